"""Bridges to frameworks: imported only where they are asked for, and the only place that imports a framework."""
