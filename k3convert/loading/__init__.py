"""Checkpoints into the native network, and native tensors back to released names."""

from k3convert.loading.hf_state_dict import to_hf_state_dict
from k3convert.loading.load_model import LoadReport, load_model, load_with_report

__all__ = ["LoadReport", "load_model", "load_with_report", "to_hf_state_dict"]
