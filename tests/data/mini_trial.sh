# mini-swe-agent on one task, then the reward: bash mini_trial.sh CLIENTS_BIN PROMPT CONFIG
set -e
cd "$(mktemp -d)"
export HOME="$PWD" MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
"$1/mini" --model-class litellm_textbased -m openai/policy -c mini_textbased.yaml -c "$3" \
    -t "$2" -y --exit-immediately -o run.traj.json < /dev/null >&2
wc -c < run.traj.json | awk '{print "{\"reward\": " $1 % 97 / 96 ", \"metrics\": {\"bytes\": " $1 "}}"}'
rm -r "$PWD"
