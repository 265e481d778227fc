"""Carries a plan out: workers, byte budget, journal, events."""
