"""Tests of ot-newton: truth, generators, tolerances and conformance checks, then one file per module."""
