"""Autoscalers that scale: the metrics APIs that they read, under a test's control."""

from kvoy_autoscaled.metrics_api import MetricsApi

__all__ = ["MetricsApi"]
