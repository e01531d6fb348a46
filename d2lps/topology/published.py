"""What data sheets and measurements say of devices and links: what presets and predictions rest on, each with its source."""

from dataclasses import replace

from d2lps.topology.device import Device

GB = 1e9

# ---- links: bytes per second in one direction, and seconds ------------------------------------------------------------

NVLINK2 = 25 * GB  # one link of a V100; it has six. NVIDIA V100 datasheet
NVLINK3_GPU = 300 * GB  # all 12 links of an A100 together. NVIDIA A100 datasheet
NVLINK4_GPU = 450 * GB  # all 18 links of an H100 together. NVIDIA H100 datasheet
PCIE3_X16 = 16 * GB  # Zhang et al., Dive into Deep Learning, "Parameter Servers"
HDR_PORT, PORT = 25 * GB, 50 * GB  # an InfiniBand port: HDR has 200 Gb/s, NDR 400 Gb/s
# Latencies of one hop, from GPU to GPU: NCCL, src/graph/tuning.cc, Simple protocol.
NVLINK_HOP = 3.4e-6
PCIE_HOP = 5.7e-6
NETWORK_HOP = 14e-6

# ---- devices ----------------------------------------------------------------------------------------------------------

# As their data sheets promise; `dataclasses.replace(A100, efficiency=0.5)` is one that keeps half of the promise.
V100 = Device(125e12, 16e9, 900e9)  # NVIDIA V100 SXM2 data sheet: FP16 on tensor cores
V100_32GB = replace(V100, memory=32e9)  # the same data sheet
A100 = Device(312e12, 80e9, 2039e9)  # NVIDIA A100 80GB SXM data sheet: FP16 and BF16 on tensor cores, dense
H100 = Device(989e12, 80e9, 3350e9)  # NVIDIA H100 SXM data sheet: BF16 on tensor cores, dense

# ---- the share of it that programs reach ------------------------------------------------------------------------------

NVLINK3_REACHED = 0.77  # NCCL's bus bandwidth: 230.8 of 300 GB/s, eight A100, 1 GiB. NVIDIA/nccl issue 527
NVLINK4_REACHED = 0.82  # 370 of 450 GB/s, by rings on H100. NVIDIA/nccl issue 1455
NETWORK_REACHED = 0.9  # of an InfiniBand port. calculon-ai/calculon, systems/a100_80g.json
MEMORY_REACHED = 0.8  # of HBM, between the 0.75 for 10 MB and the 0.9 for 100 MB of the same file
