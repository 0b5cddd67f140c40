"""Nouns shared by every room: identifiers, roles, requests, sampling parameters, spans, layouts, errors.

Nothing here imports torch, opens a socket or reads a clock.
"""
