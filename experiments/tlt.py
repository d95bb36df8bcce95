"""What the TLT paper reports, to stand beside our own figures: Tables 1 and 4, Qwen-32B on H100 GPUs (TP=4)."""

# Table 1: Draft_Depth 12, Tokens_to_Verify 64; top-k -> (accept length, speed-up).
TOP_K = {4: (8.29, 3.51), 6: (8.66, 3.65), 8: (8.67, 3.64), 10: (8.67, 3.64), 12: (8.60, 3.56), 16: (8.42, 3.47)}

# Table 4: Draft_Depth 10, topK 8; batch size -> tokens to verify -> speed-up.
BATCH = {
    1: {16: 3.22, 32: 3.46, 48: 3.56, 64: 3.62},
    2: {16: 3.08, 32: 3.28, 48: 3.39, 64: 3.38},
    4: {16: 3.01, 32: 3.09, 48: 3.13, 64: 2.98},
    8: {16: 2.73, 32: 2.63, 48: 2.51, 64: 2.27},
    16: {16: 2.67, 32: 2.52, 48: 2.24, 64: 1.91},
    32: {16: 2.48, 32: 2.23, 48: 1.90, 64: 1.70},
}

# Figure 13 gives curves, not numbers: batch size 1, topK 8, temperature 0. Accept length rises with depth and flattens;
# the speed-up has its maximum before.
