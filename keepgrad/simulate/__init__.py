"""Developers made of real code, for the demo, tests and benchmarks: corpus (what they type), developer (how they treat a suggestion),
fleet (HTTP clients), calibrate (their rates beside published telemetry).

They are a stand-in for people: what a policy gains with them shows that the loop works, not that people would gain as much.
"""
