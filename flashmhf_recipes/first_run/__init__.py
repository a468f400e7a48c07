"""The bare command: errors against float64, time and memory beside SwiGLU; a table and a picture. It needs torch alone,
and for the picture matplotlib of the extra ``flashmhf[lm]``."""
