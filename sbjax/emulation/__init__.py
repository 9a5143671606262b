"""Devices that take a profile's time instead of computing, under the real driver. No real path
imports this."""
