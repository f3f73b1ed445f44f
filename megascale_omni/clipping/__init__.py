"""Gradient clipping by module (CMSA)."""

from megascale_omni.clipping.clipper import CMSAClipper
from megascale_omni.clipping.parts import Alone, GradientPart, Group
from megascale_omni.clipping.report import ClipReport
from megascale_omni.clipping.settings import ClipConfig

__all__ = ["Alone", "CMSAClipper", "ClipConfig", "ClipReport", "GradientPart", "Group"]
