"""Made-up secrets of many kinds, in the formats that scanners know."""

import random
import string

LETTERS, DIGITS, LOWER = string.ascii_letters, string.digits, string.ascii_lowercase
ALNUM, HEX, UPPER = LETTERS + DIGITS, "0123456789abcdef", string.ascii_uppercase
SAFE = ALNUM + "_-"

# Parts of a secret: fixed texts, and (characters, number) to draw.
KINDS = {
    "1password": ["A3-", (UPPER + DIGITS, 6), "-", (UPPER + DIGITS, 11), *["-", (UPPER, 5)] * 3],
    "airtable": ["pat", (ALNUM, 14), ".", (HEX, 64)],
    "anthropic": ["sk-ant-api03-", (SAFE, 93), "AA"],
    "apify": ["apify_api_", (ALNUM, 36)],
    "aws": ["AKIA", (UPPER + "234567", 16)],
    "circleci": ["CCIPAT_", (ALNUM, 22), "_", (LOWER + DIGITS, 40)],
    "databricks": ["dapi", (HEX, 32)],
    "digitalocean": ["dop_v1_", (HEX, 64)],
    "dockerhub": ["dckr_pat_", (SAFE, 27)],
    "doppler": ["dp.pt.", (LOWER + DIGITS, 43)],
    "dynatrace": ["dt0c01.", (LOWER + DIGITS, 24), ".", (LOWER + DIGITS, 64)],
    "figma": ["figd_", (UPPER + DIGITS, 40)],
    "github": ["ghp_", (ALNUM, 36)],
    "gitlab": ["glpat-", (ALNUM, 20)],
    "grafana": ["glsa_", (ALNUM, 32), "_", (HEX, 8)],
    "groq": ["gsk_", (UPPER + DIGITS, 52)],
    "huggingface": ["hf_", (LETTERS, 34)],
    "infracost": ["ico-", (ALNUM, 32)],
    "langsmith": ["lsv2_pt_", (HEX, 32), "_", (HEX, 10)],
    "linear": ["lin_api_", (LOWER + DIGITS, 40)],
    "llama_cloud": ["llx-", (ALNUM, 48)],
    "notion": ["ntn_", (DIGITS, 11), (ALNUM, 35)],
    "npm": ["npm_", (LOWER + DIGITS, 36)],
    "nvidia": ["nvapi-", (UPPER + DIGITS, 64)],
    "openrouter": ["sk-or-v1-", (HEX, 64)],
    "perplexity": ["pplx-", (ALNUM, 48)],
    "postman": ["PMAK-", (HEX, 24), "-", (HEX, 34)],
    "private_key": ["-----BEGIN PRIVATE KEY-----\n", *[(ALNUM, 64), "\n"] * 4, (ALNUM, 40), "=="],
    "pulumi": ["pul-", (HEX, 40)],
    "pypi": ["pypi-AgEIcHlwaS5vcmc", (SAFE, 80)],
    "replicate": ["r8_", (ALNUM, 37)],
    "rubygems": ["rubygems_", (HEX, 48)],
}
END = {"private_key": "\n-----END PRIVATE KEY-----"}


def secrets(num, seed=0):
    """(kind, secret) pairs, all kinds in turn."""
    draw = random.Random(seed)
    made = []
    for number in range(num):
        kind = list(KINDS)[number % len(KINDS)]
        parts = [
            part if isinstance(part, str) else "".join(draw.choices(part[0], k=part[1]))
            for part in KINDS[kind]
        ]
        made.append((kind, "".join(parts) + END.get(kind, "")))
    return made
