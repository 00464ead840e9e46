"""What the benchmark of decode metadata is made of: fields compared, steps clocked, traces read, peers, a report."""
