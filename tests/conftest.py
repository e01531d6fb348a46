"""Fixtures that several test files share."""
