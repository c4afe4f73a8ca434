"""Batched environments and reference scores."""
