"""quantize: turn the weights that an engine keeps quantized into exactly what it loads. One file per format.

Every format computes in float32, divides by the scale (never multiplies by its reciprocal) and clamps before the cast;
what lies outside of a ragged block counts as nothing. So the bytes depend on the values alone: not on their dtype, their
strides, the number of threads or the device.

The values that are quantized are those of the group's spec: a tensor may be wider than its spec, and is then rounded to
the spec's dtype first. Float32 masters are therefore quantized as they are, and `gather.dtype=bfloat16` makes the bytes
that an engine would make of a bfloat16 checkpoint of the same weights.
"""
