"""Adapters to DeepSpeed, torch and Ray: beside extensions, the only modules that import a framework.

``import ckpttool`` does not import them; a public function imports its framework when it is called.
"""
