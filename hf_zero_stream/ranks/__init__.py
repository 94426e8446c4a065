"""Ranks of a process group: where they run, whether they live, and how they come together and agree.

- An error on one is an error on all: `rendezvous` (before a meeting), `coordinator` (at agreements), `watchdog`.
- A death is told: `transport` (the kernel knows), `presence` (which rank looks at which), `watchdog` (tells all).
- No process that is stopped or busy is taken for dead: `transport`.
- Ranks that come apart share reads, and load alone where waiting is in vain: `rendezvous`.
- Ranks that wait for each other in several places get an error: `watchdog`.
"""
