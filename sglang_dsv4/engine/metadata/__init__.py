"""Makes the metadata of decode steps: in graphs by one kernel, for eager steps on the prep stream."""
