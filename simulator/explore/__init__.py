"""Searches over plans: many scenarios, each simulated, and what they say together."""
