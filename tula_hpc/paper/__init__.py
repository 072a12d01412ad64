"""The paper's tables and figures, each from runs of this package: arXiv 2603.18112, measured again.

A result is a list of ordinary command lines (`scales`), which `running` brings to their end side by side, and a room
that makes a table, a picture and answers to the paper's claims of their run folders. Nothing here loads torch.
"""
