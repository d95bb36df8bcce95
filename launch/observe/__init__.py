"""Observation of a run in progress: files, live view, TensorBoard, Ray metrics, timeline."""

from launch.observe.drafter import TRAIN_SPAN, DrafterMeter, StepDrafter
from launch.observe.observer import Observer
from launch.observe.records import PHASES, SPAN_KINDS, Sample, Span, StepRecord, length_metrics
from launch.observe.speculation import SpeculationMeter, StepSpeculation
from launch.observe.timeline import write_trace

__all__ = [
    "PHASES",
    "SPAN_KINDS",
    "TRAIN_SPAN",
    "DrafterMeter",
    "Observer",
    "Sample",
    "Span",
    "SpeculationMeter",
    "StepDrafter",
    "StepRecord",
    "StepSpeculation",
    "length_metrics",
    "write_trace",
]
