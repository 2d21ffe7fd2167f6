"""Other packages' models, run by selective_scan's kernels; nothing is imported before it is asked.

transformers    Mamba, FalconMamba, Jamba and Zamba
"""
