"""Examples at the end of each command's help, and the address of its page."""

from __future__ import annotations

DOCS = "https://ckpttool.readthedocs.io/en/latest/howto"
"""Where the pages are."""
EXAMPLES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "inspect": (
        "inspect",
        (
            "ckpttool inspect runs/checkpoint-500",
            "ckpttool inspect runs/checkpoint-500 --ranks --files",
            "ckpttool inspect s3://bucket/run --tag global_step900 --json",
        ),
    ),
    "verify": (
        "inspect",
        (
            "ckpttool verify runs/checkpoint-500",
            "ckpttool verify runs/checkpoint-500 --deep",
            "ckpttool verify s3://bucket/run --deep --jobs 16 --json",
        ),
    ),
    "diff": (
        "compare",
        (
            "ckpttool diff runs/checkpoint-500 runs/checkpoint-600",
            "ckpttool diff before/ after/ --all",
            "ckpttool diff before/ model.safetensors --rtol 1e-3",
        ),
    ),
    "digest": (
        "compare",
        (
            "ckpttool digest runs/checkpoint-500",
            "ckpttool digest runs/checkpoint-500 --tensors",
            "ckpttool digest model.safetensors --json",
        ),
    ),
    "consolidate": (
        "weights",
        (
            "ckpttool consolidate runs/checkpoint-500 weights --to safetensors",
            "ckpttool consolidate runs/checkpoint-500 weights --to safetensors --dtype bf16",
            "ckpttool consolidate s3://bucket/run s3://bucket/weights --to torch --dry-run",
        ),
    ),
    "extract": (
        "see",
        (
            "ckpttool extract runs/checkpoint-500 lm_head.weight head.npy",
            "ckpttool extract runs/checkpoint-500 lm_head.weight head.safetensors --state exp_avg",
            "ckpttool extract runs/checkpoint-500 lm_head.weight rows.npy --index 0:10",
        ),
    ),
    "convert": (
        "convert",
        (
            "ckpttool convert runs/checkpoint-500 out --to zero --world-size 16",
            "ckpttool convert runs/checkpoint-500 out --to universal",
            "ckpttool convert fsdp2-run out --to zero --world-size 8 --stage 3",
        ),
    ),
    "ls": (
        "keep",
        ("ckpttool ls runs", "ckpttool ls s3://bucket/run --json", "ckpttool ls runs/checkpoint-500"),
    ),
    "prune": (
        "keep",
        (
            "ckpttool prune runs --keep-last 3 --dry-run",
            "ckpttool prune runs --keep-last 3 --keep-every 1000",
            "ckpttool prune runs --keep-last 1 --keep-best eval_loss",
        ),
    ),
    "pin": (
        "keep",
        (
            "ckpttool pin runs/checkpoint-500 --why 'baseline of the paper'",
            "ckpttool pin runs --tag global_step900 --why release",
            "ckpttool pin s3://bucket/run --why release",
        ),
    ),
    "unpin": (
        "keep",
        (
            "ckpttool unpin runs/checkpoint-500",
            "ckpttool unpin runs --tag global_step900",
            "ckpttool unpin s3://bucket/run",
        ),
    ),
    "cp": (
        "buckets",
        (
            "ckpttool cp runs/checkpoint-500 s3://bucket/run",
            "ckpttool cp s3://bucket/run runs --tag global_step900",
            "ckpttool cp runs/checkpoint-500 /archive --prove",
        ),
    ),
}
"""Of each command of the core its page in DOCS, and three lines that people type."""
