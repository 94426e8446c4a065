"""Ranks of a process group: where they run, and how they come together and agree.

- An error on one is an error on all: `rendezvous` (before a meeting), `coordinator` (at agreements), `watchdog`.
- A death is told: the plug-in `watch` (which rank looks at which, and how), `watchdog` (tells all).
- Ranks that wait for each other in several places get an error: `watchdog`.
- No rank asks the store once for each other rank: `store`.
"""
