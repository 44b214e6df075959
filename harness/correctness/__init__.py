"""When is an implementation right? The battery of `check`, and `verify`, which `bench` calls."""
