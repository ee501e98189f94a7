"""Adapters to DeepSpeed, torch and Ray. No other package imports a framework, and these load only on use."""
