"""The losses of `independent_update`: one eager forward a row, one target at a time."""

import math

import torch


def logprobs_of(model, row):
    """Log-probabilities of the row's tokens, and the entropy of each one's distribution."""
    logits = model(input_ids=torch.tensor([row.prompt + row.response]), use_cache=False).logits[0]
    found, entropy = [], []
    for token in row.tokens:
        at = len(row.prompt) + token.position
        logp = torch.log_softmax(logits[at - 1] / row.temperature, dim=-1)
        found.append(logp[row.response[token.position]])
        entropy.append(-(logp.exp() * logp).sum())
    return torch.stack(found), torch.stack(entropy)


def values_of(critic, head, row):
    hidden = critic(input_ids=torch.tensor([row.prompt + row.response]), use_cache=False)
    places = [len(row.prompt) + token.position - 1 for token in row.tokens]
    return head(hidden.last_hidden_state[0][places])[:, 0]


def divergence(d, kind):
    """Of the policy from the reference at a token, d = l - l_ref."""
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d**2 / 2
    return (torch.exp((-d).clamp(-20, 20)) + d - 1).clamp(-10, 10)


def policy_loss(policy, rows, c):
    """Sum over the targets of a mini-batch of weight x (correction x loss + KL - entropy)."""
    alive = [row for row in rows if row.tokens]
    tokens = [token for row in alive for token in row.tokens]
    parts = [logprobs_of(policy, row) for row in alive]
    now = torch.cat([logp for logp, _ in parts])
    entropy = torch.cat([h for _, h in parts])
    losses = token_losses(now, alive, tokens, c)
    factors = corrections(alive, c)
    total = torch.zeros((), dtype=torch.float64)
    for i, token in enumerate(tokens):
        term = factors[id(token)] * losses[i]
        if c["kl_loss_coef"]:
            term = term + c["kl_loss_coef"] * divergence(
                now[i] - token.reference, c["kl_estimator_type"]
            )
        term = term - c["entropy_loss_coef"] * entropy[i]
        total = total + weight_of(token, rows, tokens, c) * term
    return total


def weight_of(token, rows, tokens, c):
    kind = c["reduction"]
    if kind == "token_mean":
        return 1 / len(tokens)
    if kind == "sequence_mean":
        return 1 / (len(rows) * sum(t.row == token.row for t in tokens))
    if kind == "seq_mean_token_sum_norm":
        return 1 / (len(rows) * c["max_seq_len"])
    if kind == "prompt_mean":
        return 1 / (len({r.group for r in rows}) * sum(t.group == token.group for t in tokens))
    own = sum(t.trajectory == token.trajectory for t in tokens)
    return 1 / (len({r.trajectory for r in rows}) * own)


def ratio(difference):
    return torch.exp(difference.clamp(-20, 20))


def token_losses(now, rows, tokens, c):
    kind = c["policy_loss_type"]
    low, high = 1 - c["eps_clip_low"], 1 + c["eps_clip_high"]
    selected = covariance_selection(now.detach(), tokens, c) if "cov" in kind else set()
    means = {
        row.number: sum((now[tokens.index(t)] - t.old) for t in row.tokens).detach()
        / len(row.tokens)
        for row in rows
    }
    found = []
    for i, t in enumerate(tokens):
        logp, a = now[i], t.advantage
        r = ratio(logp - t.old)
        rollout = ratio(logp - t.rollout) if t.rollout is not None else None
        clipped = -torch.minimum(r * a, r.clamp(low, high) * a)
        if kind == "regular":
            loss = clipped
        elif kind == "dual_clip":
            loss = clipped if a >= 0 else torch.minimum(clipped, logp * 0 - a * c["clip_ratio_c"])
        elif kind == "gspo":
            s = torch.exp((logp - logp.detach() + means[t.row]).clamp(max=10))
            loss = -torch.minimum(s * a, s.clamp(low, high) * a)
        elif kind == "cispo":
            anchor = r if c["cispo_anchor"] == "old" else rollout
            bounds = 1 - c["cispo_eps_clip_low"], 1 + c["cispo_eps_clip_high"]
            loss = -anchor.detach().clamp(*bounds) * a * logp
        elif kind == "sapo":
            tau = c["sapo_tau_pos"] if a > 0 else c["sapo_tau_neg"]
            loss = -4 / tau * torch.sigmoid(tau * (r - 1)) * a
        elif kind == "rollout_is":
            weight = rollout.detach() if low < rollout.item() < high else 0.0
            loss = -weight * a * logp
        elif kind == "dppo":
            loss = -rollout * a * dppo_keeps(logp.item(), t.rollout, a, c)
        elif kind == "clip_cov":
            loss = clipped * (id(t) not in selected)
        elif kind == "kl_cov":
            loss = -r * a
            if id(t) in selected:
                loss = loss + c["ppo_kl_coef"] * (logp - t.old).abs()
        elif kind == "importance_sampling":
            loss = -r * a
        else:
            loss = -logp
        found.append(loss)
    return found


def dppo_keeps(logp, rollout, a, c):
    """1, or 0 where the step moves on beyond a divergence from the sampler."""
    p, q = math.exp(logp), math.exp(rollout)
    if c["dppo_type"] == "binary_tv":
        up, down = p - q > c["dppo_delta_high"], q - p > c["dppo_delta_low"]
    else:
        kl = q * (rollout - logp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        up = p > q and kl > c["dppo_delta_high"]
        down = p < q and kl > c["dppo_delta_low"]
    return 0.0 if (a > 0 and up) or (a < 0 and down) else 1.0


def covariance_selection(now, tokens, c):
    """Of the mini-batch; clip_cov takes all candidates, where its share is 1."""
    n, logps = len(tokens), now.tolist()
    mean_a, mean_l = sum(t.advantage for t in tokens) / n, sum(logps) / n
    cov = [(t.advantage - mean_a) * (logps[i] - mean_l) for i, t in enumerate(tokens)]
    if c["policy_loss_type"] == "kl_cov":
        most = max(1, int(n * c["kl_cov_frac"]))
        order = sorted(range(n), key=lambda i: -cov[i])
        return {id(tokens[i]) for i in order[:most]}
    assert c["clip_cov_ratio"] == 1
    found = set()
    for i, t in enumerate(tokens):
        r = math.exp(logps[i] - t.old)
        bound = min(max(r, 1 - c["eps_clip_low"]), 1 + c["eps_clip_high"])
        is_clipped = -bound * t.advantage > -r * t.advantage
        if c["clip_cov_lb"] < cov[i] < c["clip_cov_ub"] and not is_clipped:
            found.add(id(t))
    return found


def corrections(rows, c):
    """What each target's loss is multiplied by to correct for the sampler."""
    tokens = [t for row in rows for t in row.tokens]
    anchored = c["policy_loss_type"] in ("rollout_is", "dppo")
    anchored |= c["policy_loss_type"] == "cispo" and c["cispo_anchor"] == "rollout"
    kind = c["tis_ratio_type"]
    if kind == "auto":
        kind = None if anchored else "token"
    known = all(t.rollout is not None for t in tokens)
    if c["policy_loss_type"] == "cross_entropy" or not known:
        return {id(t): 1.0 for t in tokens}
    factors = {}
    for row in rows:
        kept = list(row.tokens)
        rho = {id(t): math.exp(min(max(t.old - t.rollout, -20), 20)) for t in kept}
        low, high = c["outlier_token_is_threshold_low"], c["outlier_token_is_threshold_high"]
        if any(beyond(rho[id(t)], low, high) for t in kept):
            kept = []
        low, high = c["token_mask_is_threshold_low"], c["token_mask_is_threshold_high"]
        kept = [t for t in kept if not beyond(rho[id(t)], low, high)]
        total = sum(t.old - t.rollout for t in kept)
        product = math.exp(min(max(total, -20), 20))
        mean = math.exp(total / max(len(kept), 1))
        metric = c["sequence_mask_metric"]
        if metric == "geometric" and beyond(mean, c["geo_mask_low"], c["geo_mask_high"]):
            kept = []
        if metric == "product" and beyond(product, c["product_mask_low"], c["product_mask_high"]):
            kept = []
        inside = {id(t) for t in kept}
        for t in row.tokens:
            weight = 1.0
            if kind == "token":
                weight = min(rho[id(t)], c["token_tis_ratio_clip_high"])
            elif kind == "sequence":
                weight = min(product, c["sequence_tis_ratio_clip_high"])
            factors[id(t)] = weight if id(t) in inside else 0.0
    return factors


def beyond(value, low, high):
    return (low is not None and value < low) or (high is not None and value > high)


def critic_loss(critic, head, rows, c):
    """Mean over the trained tokens of the mini-batch."""
    losses = []
    for row in (row for row in rows if row.tokens):
        for value, t in zip(values_of(critic, head, row), row.tokens, strict=True):
            loss = (value - t.target) ** 2
            if c["value_clip"] is not None:
                near = (value - t.value).clamp(-c["value_clip"], c["value_clip"])
                loss = torch.maximum(loss, (t.value + near - t.target) ** 2)
            losses.append(loss / 2)
    return sum(losses) / len(losses)
