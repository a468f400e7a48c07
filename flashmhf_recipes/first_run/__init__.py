"""The bare command: errors against float64, time and memory, small language models; a table and a picture.

It ends within three minutes on any machine: steps are timed, and what would not be done in time is left out and named.
The language models need the extra ``flashmhf[lm]``; the rest needs torch alone.
"""
