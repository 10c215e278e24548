"""Write the pictures of the viewer in docs/images/.

    python docs/screenshots.py RUN

RUN is a run of the shop example by the model that sampled it, with recorded tokens:

    rollouts convert examples/shop.calls.jsonl --rewards examples/shop.rewards.jsonl --out shop
    rollouts train shop --model .cache/smollm2 --out RUN --lr 5e-5 --set run.record_tokens=all \
        --set data.drop_zero_variance_groups=true --set batch.groups_per_batch=2 --set batch.groups_per_mini_batch=1 \
        --set batch.max_updates=2 --set loss.kl_loss_coef=0.01 --set loss.tis_ratio_type=token \
        --set loss.token_mask_is_threshold_low=0.8 --set loss.token_mask_is_threshold_high=1.25
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
# The view's address in the page, whether it is dark, and the height in pixels of what is of interest.
PICTURES = {
    "view_tokens": (
        "tokens?task=shop-1&trajectory=shop-1_2&step=1&update=2&color=importance_weight",
        False,
        640,
    ),
    "view_update": ("update?update=2", False, 760),
    "view_group": ("group?task=shop-1&update=2", True, 520),
}
WIDTH = 1320


def main() -> None:
    """Open each view in Chromium and save what it shows."""
    from PIL import Image

    from tests.helpers.browser_helpers import ROOT, chromium, viewing

    tokenizer = ROOT / ".cache" / "smollm2"
    with viewing(sys.argv[1], "--tokenizer", tokenizer) as (address, _), chromium() as browser:
        for name, (place, is_dark, height) in PICTURES.items():
            page = browser.new_page(
                viewport={"width": WIDTH, "height": height},
                device_scale_factor=2,
                color_scheme="dark" if is_dark else "light",
            )
            page.goto(f"{address}#/{place}")
            page.wait_for_selector("h1")
            page.wait_for_selector(".waiting, [aria-busy=true], td.pending", state="detached")
            if name == "view_tokens":
                page.keyboard.press("w")
                page.wait_for_selector("aside[data-token]")
            page.wait_for_timeout(300)
            shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            shot.save(IMAGES / f"{name}.webp", quality=80, method=6)
            page.close()


if __name__ == "__main__":
    main()
