"""The bare command: errors against float64, time and memory, small language models; a table and a picture. The
language models need the extra ``flashmhf[lm]``; the rest needs torch alone."""
