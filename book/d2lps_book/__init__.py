"""What stands beside the chapters: the checks of their exercises (`check`), the benchmarks of *How fast is it?* (`bench`).

And what one chapter alone looks at: which collectives a product of sharded matrices needs (`sharded_product`).
"""
