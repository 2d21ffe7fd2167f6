"""Runs other packages' models with selective_scan's kernels; imports those packages on demand.

transformers    Mamba, FalconMamba, Jamba and Zamba
"""
