"""Adapters to DeepSpeed, torch and Ray: the only package that imports a framework, and imported only on use."""
