"""What stands beside the chapters: the checks of their exercises (`check`), and the benchmarks of *How fast is it?* (`bench`)."""
