"""Calibration: measure a model's key means, query moments and probability threshold, save and load them."""

from bitdecoding.calibration.data import Calibration, LayerCalibration
from bitdecoding.calibration.prompts import CALIBRATION_PROMPTS

__all__ = ["CALIBRATION_PROMPTS", "Calibration", "LayerCalibration"]
