"""Ranks that share the layers: schedules as data, what carries them out, and stages of equal length."""
