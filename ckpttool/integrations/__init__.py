"""Adapters to DeepSpeed, torch, Ray, Hugging Face and Lightning: the only modules that import a framework.

``import ckpttool`` does not import them; a public function imports its framework when it is called.
"""
