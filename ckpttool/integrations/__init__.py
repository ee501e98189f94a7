"""Adapters to DeepSpeed, torch, Ray, Hugging Face and Lightning: the only modules that import a framework.

``import ckpttool`` imports none of them; a function of the public interface imports its own when it is used.
"""
