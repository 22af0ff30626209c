# SPDX-License-Identifier: Apache-2.0
"""Interleaved GPU timings of linear attention layers; wrong answers get no time. And models for servers.

    python -m benchmarks.bench

Call it in the root of a checkout, or with PYTHONPATH there: the processes that it starts import it, too. The scripts of
benchmarks/ put that root on their own path; those that start `benchmarks.bench...`, such as record.py, need the same.
"""
