"""Catalogue of error ids with kind, cause and fix; docs/errors.md is generated from it.

Only the documentation and the tests import this module. A test compares these ids with the ids that
the code raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from schemas.errors import (
    ConfigError,
    EngineError,
    InputError,
    InvariantError,
    MissingExtra,
    RolloutError,
)
from schemas.rules import RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorId:
    """The error classes, cause and fix of an error id.

    Attributes:
        kinds: Error classes that use this id; several if the class depends on where the cause is.
        cause: Cause of the error, as one sentence.
        fix: How to fix the error, as one sentence.
    """

    kinds: tuple[type[RolloutError], ...]
    cause: str
    fix: str


# One paragraph per id, with its cause and its fix as one sentence each.
_INPUT = """\
admin_key: The recorder has an admin key, and the request has a different key or none.
    Send `Authorization: Bearer ADMIN_KEY`.
advantage_estimator_raised: The custom advantage estimator raised an exception.
    Correct the function at the line that the message names.
agent_calls: The agent made no model call, or made a call after it had returned.
    Make at least one call, and await every call before the agent returns.
agent_raised: The agent raised an exception.
    Correct the agent's code, or handle the exception there.
agent_reward: The agent did not return a finite number as its reward.
    Return a finite number from the agent.
agent_timeout: The agent did not finish before `agent_timeout_s`.
    Raise `agent_timeout_s`, or limit the agent's turns.
all_or_none: The export format needs a value in every row or in none, but a column has both values
    and nulls.
    Drop the column, or keep only the rows where it is not null.
assistant_masks: The chat template does not mark the text that the model generates
    (`{% generation %}`), or does not mark every assistant message exactly once.
    Set `chat_template` to a template with `{% generation %}` marks, such as
    `qwen3_without_thinking`.
atif_call_count: An ATIF step has token ids although its `llm_call_count` is 0.
    Correct the step in the program that wrote the file.
atif_duplicate_id: Two embedded trajectories of an ATIF file have the same id.
    Give every embedded trajectory a different `trajectory_id`.
atif_step_id: The steps of an ATIF file are not numbered 1..n.
    Copy the file from its source again, because steps are missing or out of order.
atif_version: The ATIF file has an unknown `schema_version`.
    Write the file in one of the versions that the message names.
audit_rows: No row of the dataset can be audited, or a candidate's vocabulary lacks a token of a row.
    Pass weights of the labelled versions, with the dataset's tokenizer, and rows with
    `rollout_logprobs`.
blame_rows: The custom policy loss computes the loss of a row from other rows of its micro-batch, so
    the gradient cannot be split into rows.
    Replay the update without a row instead: `rollouts replay RUN --update N --without ID`.
body_timeout: The client stopped sending the body of its request.
    Send the body without pausing for a minute or longer.
calls_lost: Calls of a session could not be written to the journal, so its trajectory is incomplete.
    Free disk space for the recording directory, and run the trajectory again.
checkpoint_latest: `checkpoints/latest` names a checkpoint that does not exist.
    Write the name of an existing checkpoint of the run into `checkpoints/latest`.
checkpoint_state: A checkpoint has no training state, or its state cannot be read.
    Write the name of an earlier checkpoint into `checkpoints/latest`, start a new run with
    `--model CHECKPOINT`, or, to replay an update, move the checkpoint out of the run.
choice_index: The choices of a response do not have the indices 0..n-1.
    Log the response as the engine returned it.
conflicting_ids: The log contains two copies of the token ids or log-probabilities of a call, and
    they differ.
    Convert the original log, unmodified.
dangling_reference: The log refers to a trajectory, message, attachment or node that it does not
    contain.
    Copy all files of the log from its source, or write the log again.
dataset_exists: The path is not a rollout dataset: it does not exist, or has no `.parquet` files.
    Correct the path, or run the interrupted conversion again to finish it.
disk_full: The disk is full, and the run cannot write its output.
    Free disk space and run the same command again with `--resume`.
duplicate_input: The same log was passed twice, or two logs have the same content.
    Pass each log once, or pass `--on-error skip`.
duplicate_record: A record is an exact copy of an earlier one.
    Remove the copy, or pass `--on-error skip`.
engine_request: A request from a harness is not a JSON object, lacks `messages` or `prompt`, or uses
    a feature whose response cannot be recorded token by token.
    Send a chat or text completion request without the field that the message names.
enough_groups: A dataset of the mixture has fewer groups than its `--share` requires.
    Pass a smaller `--sample-groups`, or a smaller `--share` for this dataset.
env_output: The environment returned a value of the wrong type, or lacks a required key.
    Return observations, reward and done as docs/generation.md describes.
env_raised: The environment raised an exception.
    Correct the environment's code, or handle the exception there.
env_timeout: A call to the environment did not return before `env_timeout_s`.
    Raise `env_timeout_s`, or correct the call that hangs.
existing_run: The output directory already contains a training run.
    Pass `--resume` to continue that run, or choose a different `--out`.
field_kind: A field of a GeneratorOutput has values of the wrong type.
    Use the types of SkyRL's GeneratorOutput, or drop unknown fields with `--other-fields drop`.
fields: A GeneratorOutput lacks a required field, has an unknown field, needs ids or a group size,
    or has metrics that cannot be written as JSON.
    Add the missing field, pass `--other-fields keep` or `drop`, or pass `--group-size N`.
fields_align: The fields of a GeneratorOutput have different numbers of entries.
    Give every field one entry per row, or drop the field with `--other-fields drop`.
file: A file could not be opened, read or written, or the operating system failed.
    Check that the path exists, that you have permission to access it, and that the disk is healthy.
file_metadata: The metadata of a dataset cannot be read, or datasets that are combined have
    contradictory metadata.
    Write the file again from its source, convert one of the datasets to match, or pass `--outcome`
    where returns differ.
filesystem: The filesystem of the URL is unknown to fsspec, or its package is not installed.
    Install the fsspec package of that filesystem, or correct the URL.
fixed_base: The chat template changes earlier messages when messages are appended, so new messages
    cannot be tokenized separately.
    Set `history = "step_wise"`, or use a chat template that only appends.
foreign_host: The `Host` header names a host that the server does not serve.
    Use the URL that the server printed, or start it with `--allow-host NAME`.
foreign_origin: A web page of a different site sent the request.
    Open the server's page directly, or call it from a program instead of a web page.
format_loads: An installed format cannot be imported, or is not an `Adapter`.
    Reinstall the package that provides the format, or remove it.
free_name: A column of the dataset has the same name as a column that the export format adds.
    Rename the column in the dataset.
generation_prompt: The chat template does not begin assistant messages with its generation prompt,
    or its generation prompt depends on the conversation.
    Use a template whose assistant messages begin with its generation prompt, such as
    `qwen3_acc_thinking`.
generator_input: A GeneratorInput lacks prompts, has fields of different lengths, repeats a
    trajectory id, or sets `n` to a value other than 1.
    Pass one entry per prompt, each with a unique trajectory id.
generator_output: The custom generator returned a value that is not a valid GeneratorOutput.
    Return a dict of lists with one entry per row.
generator_raised: The custom generator raised an exception.
    Correct the generator's code, or return failed trajectories as placeholder rows.
generator_timeout: The custom generator did not return before `agent_timeout_s`.
    Raise `agent_timeout_s`, or correct the call that hangs.
group: A run in the log has no instance id or group id.
    Convert the original, unmodified log, which contains the ids that the message names.
harbor_export: The file is Harbor's traces export, which no format can read.
    Convert the trial directory or its `agent/trajectory.json`, or pass `--on-error skip`.
harbor_input: The path is not a Harbor job or trial directory, a `result.json`, or an ATIF
    trajectory.
    Check the path with `rollouts formats FILE`.
harness_error: The harness reported that it failed.
    Correct the problem that the harness reports in the message.
harness_exit: The command of the harness exited with a non-zero status, or was killed by a signal.
    Correct the command; the message contains the end of its output.
harness_raised: The harness function raised an exception.
    Correct the harness function, or return `{"error": TEXT}` for a run that failed.
harness_reward: The harness returned no valid reward, or its reward file cannot be read.
    Return a finite reward as docs/rl.md describes, or write it to `{reward_file}`.
harness_start: The harness's program cannot be started.
    Install the program, or put it on PATH; pass a long prompt through `{task_file}`.
harness_timeout: The harness did not finish before its time limit.
    Raise `agent_timeout_s`, or limit the turns of the harness.
head_size: The headers of the request exceed 64 KiB.
    Send smaller headers.
head_timeout: The client did not send complete request headers within a minute.
    Send the headers without pausing.
image_file: The directory for the image does not exist.
    Create the directory, or choose a different `--out`.
incomplete_trajectory: A different record of the same run was rejected, and runs are converted
    completely or not at all.
    Correct the record that the message names, or remove it if the run is complete without it.
input_file: The input cannot be read, is not a regular file, is empty, too large or damaged, or
    changed during the conversion.
    Check the path, and copy the file again when the program that writes it has finished.
inspect_archive: The zip archive is not an Inspect log: it has no `header.json`.
    Pass an `.eval` file that Inspect wrote.
iteration_failed: All trajectories of an iteration failed.
    Fix the cause of the first error, remove the directory that the message names, and run the same
    command with `--resume`.
journal: The recorder cannot write a call to its journal.
    Free disk space for the recording directory, and check its permissions.
json_document: The file is not a single valid JSON document.
    Write or copy the file again, because it is incomplete or has a different format.
json_file: The GeneratorOutput file is not a single JSON object.
    Write it with `rollouts export DS --format skyrl`.
json_line: A line is not a single valid JSON object in UTF-8.
    Repair the line from its source, or delete it.
json_number: A value to export is NaN or infinite, which JSON cannot represent.
    Drop the metric, or replace NaN and infinity.
last_flag: `is_last_step` of a GeneratorOutput contains a value other than true or false.
    Store one boolean per row.
lfs_pointer: The file is a Git LFS pointer, not its content.
    Run `git lfs pull`.
logprob_tokens: The log-probabilities of a call belong to different tokens than its token ids or
    text.
    Collect the call again, and log the response as the engine returned it.
logprobs_kind: Some exported rows have `rollout_logprobs` and others do not.
    Drop the column, or keep only the rows that have it.
loss_reduction_raised: The custom loss reduction raised an exception.
    Correct the function at the line that the message names.
mask_kind: `loss_masks` of a GeneratorOutput contains a value other than 0 or 1.
    Store 0 or 1 per response token.
media_type: The body of the request is not declared as JSON.
    Send `Content-Type: application/json`.
memory: The command needs more memory than there is.
    Use a machine with more memory, or split the input.
message: A message has no role, or its content, tool calls or response have an unsupported type.
    Log messages in the OpenAI format, with text content.
message_role: A message after the first assistant message has a role other than assistant, user or
    tool.
    Put instructions before the first assistant message, or send later ones as user messages.
messages: `messages` are missing, are not JSON, or are not a list, so the call's text cannot be
    tokenized again.
    Convert a log that contains the messages, or run `rollouts drift` without `--retokenize`.
method: The path does not accept this HTTP method.
    Use the method that the message names.
metric: The run has no numbers for this metric, or has made no update.
    Set `--metric` to a name that the message lists.
metrics_file: `metrics.jsonl` is missing, empty or invalid.
    Pass the directory of a run that `rollouts train` or `rollouts rl` wrote.
missing_trials: A Harbor job directory has fewer trials than its `result.json` counts.
    Resume the job, copy it completely, or pass its trial directories individually.
mixed_time: Some calls of a session have a `time` and others do not.
    Give every call of the session its `time`, or none.
model_config: `config.json` lacks the layers, heads or sizes that the FLOP estimate needs.
    Leave `--model` out and pass the number of parameters with `--params`.
model_directory: The path is not a local Hugging Face model directory.
    Download the model with `hf download ORG/NAME --local-dir DIR`, and pass DIR.
model_layers: The model has layers or attention that the trainer does not support, or its
    log-probabilities for packed rows differ from its own forward pass.
    Choose an architecture that docs/models.md lists, or pass `--set batch.sequence_layout=merge` if only
    the tree differs.
model_load: The weights, the adapter or the value head cannot be loaded, or do not match
    `config.json`.
    Download the model again, or choose a checkpoint whose files belong to this model.
model_quantised: The model to train has quantised weights, which cannot be updated or saved.
    Train the model that was quantised, or dequantise it with Transformers' `model.dequantize()`.
nesting: JSON, TOML or directories are nested too deeply.
    Flatten the input, or move its files to fewer levels of directories.
new messages: The new messages at the end of a chat are not all user or system messages, so
    `rollouts record --exact-prefix` forwards the call unchanged (it counts such calls, but prints
    no error).
    Append only user or system messages to a conversation that should continue token by token.
no_calls: The log, run or file contains no model call, or no model response.
    Remove the run, or give it an `error` in `--rewards` if the agent failed.
no_conversation: The log contains the results of the runs but not their messages.
    Convert the agent's own log instead, with `--rewards` for the results.
no_prompt: A step of a SWE-agent trajectory has a response but not the prompt of its call.
    Write the trajectory again with a SWE-agent version that logs `query`.
no_response: A logged call has no response, or the response is an error from the engine.
    Delete its line, or give its session an `error` in `--rewards`.
no_samples: The Inspect log contains no samples.
    Run the evaluation again without `--no-log-samples`.
endpoint_token: The request to a trajectory's base URL lacks the trajectory's token.
    Send the endpoint's `api_key`, which commands get in OPENAI_API_KEY, as `Authorization: Bearer`.
no_session: The request does not name a session, or its trajectory has already ended.
    Use the base URL that was given for the session.
no_such_path: The server has no such path.
    Use a path that the message lists, and send other requests to the engine directly.
no_token_ids: The log has text but no token ids for a call, or for only some calls.
    Log token ids (vLLM: `return_token_ids`), or pass `--tokenizer DIR` to tokenize the text again,
    which is not exact.
no_trial_result: A Harbor trial directory has no `result.json`, because the trial was stopped.
    Resume its job, or move the directory away.
nothing_left: The filters dropped every trajectory or row, or the mixture has no groups.
    Loosen the filter that dropped the most, and look at the data with `rollouts stats DS`.
one_host: The request has no `Host` header, or more than one.
    Send exactly one `Host` header.
one_sequence: A trajectory of a GeneratorOutput has several sequences, because its environment
    replaced an action.
    Set `history = "step_wise"`.
open_files: The process reached its limit of open files.
    Raise the limit, for example with `ulimit -n 4096`.
other_api: A logged response is of an API whose tokens the format does not read.
    Log chat completions of the engine, or rename the fields as the error says.
other_tokenizer: The tokenizer decodes the logged token ids to text that differs from the logged
    text.
    Set `--tokenizer` to the tokenizer of the model that sampled the tokens.
output_file: The output cannot be written to this path.
    Choose a writable path on a disk with free space; recordings need a local disk.
parquet_file: The Parquet file is damaged or cut off, or was not written by TRL.
    Copy the file again.
partial_groups: A group has more or fewer trajectories than `group_size`, and the advantage
    estimator compares trajectories within groups.
    Set `partial_groups` to `mask` or `train`, or restore the missing trajectories.
path: The path is empty.
    Pass a path; check that the shell variable is set.
pickle: The file is a pickle, which is never opened because it could run arbitrary code.
    Pass SkyRL's GeneratorOutput to `rollout_io.from_generator_output` in Python; write other data as
    JSON Lines.
policy_loss_type_raised: The custom policy loss raised an exception.
    Correct the function at the line that the message names.
process_lost: A training process of the run was killed, failed or stopped responding, and the other
    processes cannot continue without it.
    Find the run's first error, or check whether memory ran out; then continue with `--resume`.
readable_file: A Parquet shard of the dataset is damaged, cut off, or not Parquet.
    Restore the shard from a copy, or convert the dataset again.
record_type: A field of a log record has the wrong type, or a required field is missing.
    Compare the record with its format in docs/formats.md.
recorder: The recorder did not respond, or rejected a request to open or end a session.
    Start `rollouts record`, and check the recorder's URL and the session's name.
remote_store: The object store or web server refused the request, or failed on every attempt.
    Check the URL, the credentials and the network, and run the same command again.
replay_routing: The dataset records routed experts that this model cannot replay.
    Train the model that sampled the data, or pass `--set batch.replay_routing=false`.
replay_run: The directory does not contain a run of `rollouts train` or `rollouts rl`.
    Pass the directory that the run wrote (its `--out`).
replay_skipped: A mini-batch before the update is skipped now but was not skipped in the run, or
    vice versa.
    Replay on the machine of the run, with the same versions of its packages.
replay_update: The run has not made the update.
    Choose a `global_step` of the run's `metrics.jsonl`.
replay_without: `rollouts replay --without` names rows that the update does not train on, or leaves
    no row.
    Name a trajectory of the update's dataset, or `TRAJECTORY:STEP` with a stored `step_index`.
request_size: The body of the request, the number of its prompts, or its fields other than messages,
    prompt and tools exceed a limit.
    Send a smaller request, or raise `rollouts record --max-request-mb`.
resume_dataset: The trajectories, returns or tokens of the dataset have changed since the run began.
    Restore the dataset, or start a new run.
resume_metrics: `metrics.jsonl` has fewer lines than the run had mini-batches before the checkpoint,
    or a line that was not written by a run.
    Restore the run's `metrics.jsonl` from a copy, or start a new run.
resume_rollouts: The rollouts of an iteration have more groups than the run samples, or groups that
    also belong to a different iteration.
    Remove the directory that the message names, so that its groups are sampled again.
retokenize: The messages contain no assistant message, or begin with one.
    Put a prompt before the first assistant message, and leave out conversations that the model did
    not answer.
return_unchanged: Dropping rows would change the return of a trajectory, because a dropped row has a
    reward.
    Pass `--move-outcome` to place the outcome on the last remaining row.
reward_kind: The rewards of a GeneratorOutput are a number for some rows and a list for others, or
    only some exported rows have `rewards`.
    Use one number per row, or one list per row.
reward_known: The export format needs a reward in every row, but a row has none.
    Convert with `--rewards FILE`, filter out these trajectories, or set their `error`.
reward_line: A reward record does not name exactly one trajectory, has neither a reward nor an
    error, repeats a trajectory, or uses a reserved key.
    Write one record per trajectory, such as `{"session": "shop-1/0", "reward": 1.0}`.
rollout_logprobs: The loss or the importance weights need the sampler's log-probabilities, which are
    missing, or were not computed for the distribution that was sampled from.
    Record log-probabilities with vLLM's `--logprobs-mode processed_logprobs`, or pass
    `--set loss.tis_ratio_type=none`.
routing_complete: The export to slime needs routed experts for all tokens but the last, and the row
    has fewer.
    Drop the column `rollout_expert_indices`, or record routing for all tokens but the last.
run_in_use: A different process is training in this output directory.
    Wait until that process ends, or stop it.
sampled_item: A Responses log has token ids on an input item instead of on an item that the model
    sampled.
    Log the token ids on the items with which the model server returned them.
sampling_defaults: Rows do not record how they were sampled, and the model's
    `generation_config.json` has settings that engines use for such requests.
    Pass `--set data.sampling_defaults=model` if the engine used that file, or `=neutral` if it sampled
    at temperature 1 without truncation.
schema_version: The dataset was written by a newer version of rollout-io, or by a version that this
    one cannot upgrade.
    Run `pip install --upgrade rollout-io`.
session_ended: The session has already ended, possibly with a different outcome.
    Give the next run a different repetition.
session_key: The API key is missing, or is not the key of this session.
    Use the `base_url` and key that `POST /sessions` returned.
session_name: A session name is not `INSTANCE/REPETITION`, with repetitions numbered from 0; or a
    name in a rewards file matches several runs.
    Name sessions `shop-1/0`, `shop-1/1`, ..., and percent-encode them in URLs.
session_open: The session is already open.
    Open a session with a different repetition, or end this one first.
shards_complete: A shard of the dataset is missing, was renamed, or belongs to a different dataset.
    Restore the missing shard from a copy, or write the dataset again from its source.
shared_storage: The worker processes do not share the storage of the output directory.
    Pass `--workers 1`, or write to storage that all workers can see.
some_rows: There are no rows to export.
    Export a dataset with rows, or change `--failed` if only groups with failed trajectories are
    left.
special_tokens: A text contains a special token, which the tokenizer cannot encode as plain text.
    Use a tokenizer with a `tokenizer.json`, or replace the special token in the text.
tasks: The task file cannot be read, has no tasks, repeats an `instance_id`, or has a task with an
    invalid field.
    Write one JSON object per task, with a `prompt` and a unique `instance_id` as docs/generation.md
    describes.
temperature: A row was sampled at a temperature that is negative or not finite.
    Filter these rows out, or correct their `temperature`.
text_kept: The chat template leaves out a part of a message, so the tokens would not contain it.
    Set `--chat-template` to a template that renders the entire message, or put the text into the
    message's content.
token_fields: An item of a Responses log has only some of its three token fields.
    Log all three token fields of each item that the model sampled.
token_source: The row's token ids come from tokenized text, so they cannot be compared with a
    tokenization of the text.
    Run `rollouts drift --retokenize` only on datasets with exact token ids.
tokenizer_fingerprint: The model's tokenizer differs from the tokenizer that produced the dataset's
    token ids.
    Train the model whose tokenizer produced the ids, or pass `--set data.allow_other_tokenizer=true` if
    the model's tokenizer only adds tokens.
tokens_disagree: Two files describe the same run with different calls or tokens.
    Convert each run separately, or pass only the correct file.
too_many_sessions: The recorder has 100,000 sessions that have not been written yet.
    End the sessions that are done (`POST .../end`).
tool_arguments: The arguments of a tool call are not a JSON object.
    Log a call that could not be parsed as text in the message's content.
tools: The tools are not a list of JSON schemas, or one of them is not a function.
    Pass function schemas that can be serialised as JSON.
torch_file: The file was not written by `torch.save`, is cut off, or contains objects other than
    plain data and tensors.
    Save the debug rollout of slime again.
trajectories: The custom generator returned trajectories that were not requested, or omitted
    trajectories that were.
    Return every requested trajectory once, and a failed one as a placeholder row.
trajectory_id: A trajectory id of a GeneratorOutput has no string `instance_id`, or no integer
    `repetition_id` below 2147483648.
    Store both values in every entry of `trajectory_ids`.
unique_group: Two datasets of the mixture contain the same group, or a dataset was passed twice.
    Pass `--prefix-names`, or pass each dataset once.
unique_outcome: Two outcomes have the same `trajectory_id`.
    Keep one outcome per trajectory.
unknown_outcome: A trajectory without an error has no finite return, so it cannot be trained on.
    Convert with `--rewards FILE`, train without rewards (`loss.policy_loss_type = "cross_entropy"`), or
    leave these trajectories out: `rollouts filter --drop-unknown`.
unknown_reward: The advantage estimator adds up step rewards, and a row has neither `reward` nor
    `rewards`.
    Place the rewards with `pipelines.place_outcomes`.
unknown_session: The session does not exist: it made no call, or its log file is missing.
    Correct the session's name, or give a run without calls an `error`.
unreadable_record: Reading the record raised an unexpected exception, which is a bug in the format's
    reader.
    Report the bug, and attach the record.
usage_counts: The token counts in the log (`usage`) differ from the numbers of token ids.
    Collect the call again, because ids are missing or belong to a different call.
view_bundle: The page of `rollouts view` is not built.
    Build it with `make view`, or install a released wheel, which contains it.
view_query: The viewer's page, or another client, sent a parameter that is missing or invalid.
    Correct the parameter that the message names.
view_size: A prefix tree has too many tokens to be shown at once.
    Open the tree of one trajectory, or merge the dataset first.
view_table: A Parquet file given to `rollouts view` is neither a dataset nor a table that `rollouts
    audit` or `rollouts blame` wrote.
    Pass a table that `rollouts audit` or `rollouts blame` wrote, together with its dataset or run.
view_token: A request to the viewer has no token or the wrong token.
    Open the address that `rollouts view` printed.
weights_mismatch: Rows of an iteration were not sampled by the weights or settings that they are
    labelled with.
    Fix the cause that the message names, or train on the rows with `--set loop.on_mismatch=warn`.
worker: A worker process died, often because memory ran out.
    Run the same command again to resume, or pass `--workers 1`.
working_directory: The working directory was deleted or moved while the shell was in it.
    Change to an existing directory (`cd`), and run the command again.
writer_is_open: The writer was already closed, or an earlier write failed.
    Create a new writer.
zero_advantages: Every advantage is 0, because all trajectories of a group have equal returns.
    Look at the rewards with `rollouts stats DS`, and use tasks or rewards that vary within a group.
zip_archive: The zip archive is damaged, protected by a password, too large, compressed with an
    unsupported method, or changed during the conversion.
    Copy the archive again, or compress its files again with deflate or Zstandard.
"""

_CONFIG = """\
address: The server cannot listen on this host and port, for example because another process uses
    the port.
    Pass a free port, or `--port 0` to pick one.
agent: The custom agent cannot be imported, or is not an `async def` function.
    Set `agent` to `module:name` of an `async def` function that can be imported.
choices: An option of the conversion has an unknown value, does not apply to the log's format, or
    has the wrong type.
    Pass one of the values that the message lists, or leave the option out.
compile_layers: The layers of this model cannot be compiled one by one.
    Set `compile_layers` to false.
condition: The SQL condition cannot be parsed, is not a condition on each row, is too long, or does
    not match the types of the columns.
    Write an SQL expression over the columns of one row, such as `reward > 0`.
config_file: The configuration file is not valid TOML.
    Correct the file at the line that the message names.
config_key: A configuration key is unknown, missing, malformed, or set by `rollouts rl` itself.
    Use a key that docs/training.md, docs/generation.md or docs/rl.md lists, and write overrides as
    `--set key=value`.
config_value: The value of a setting or option has the wrong type, is out of bounds, or contradicts
    a different setting.
    Set it to a value that the message allows.
environment: No environment is configured, skyrl-gym has no environment of this name, or the custom
    environment cannot be imported.
    Set `environment` to `module:Class`, or to a name that skyrl-gym registers.
float32_head: `float32_head` needs a head that is a linear layer, and the model has none.
    Leave `float32_head` out.
generator: The custom generator cannot be imported or created, or has no
    `async def generate(self, input_batch)`.
    Set `generator` to `module:Class` of a class that takes `(engine, tokenizer, config)` and
    defines that method.
gradient_checkpointing: The layers of this model do not support gradient checkpointing in
    Transformers.
    Set `gradient_checkpointing` to false.
group_by: `--group-by` names a label that a run of the log does not have.
    Set `--group-by` to labels that the message lists, or leave it out.
harness: The harness cannot be imported or parsed as a command line, or its command uses a field
    that does not exist or that a shell would run as code.
    Set `harness` to `module:function` or to a command line whose fields docs/rl.md lists.
image_format: Matplotlib cannot write images with this file extension.
    Use one of the extensions that the message lists, such as `.png`.
known_column: The dataset has no column of this name.
    Use a column that the message lists, and put strings in single quotes.
known_trajectory: The dataset has no trajectory with this id.
    Look up the id with `rollouts inspect DS`.
launch: The processes were launched in a way that the trainer does not support.
    Launch the processes with one of the commands in docs/training.md, without the option that the
    message names.
lora_target_modules: `lora_target_modules` matches no linear layer of the decoder, or the model has
    no layer that can be adapted.
    Leave `lora_target_modules` out, or name linear layers of the decoder.
ray_address: No Ray cluster responds at this address.
    Check the cluster with `ray status`, or unset `RAY_ADDRESS` to start one locally.
replay_change: `rollouts replay --set` names a key that affects more than one update, or needs a
    critic that the run does not have.
    Change a key of the loss, the advantages or the optimizer, or start a new run.
replay_place: The run's dataset or model is not at the path that its `config.json` names.
    Pass `--set data.dataset=PATH` or `--set model.path=DIR`, or run the command where the run was started.
resume: The output directory contains a dataset that was not generated, or that was generated with a
    different configuration.
    Use the configuration that the dataset was generated with, or choose a different `--out`.
sampling: A sampling setting is out of bounds, unknown, or set twice.
    Set it to a value that the message allows.
shares: A dataset of the mixture has no share above 0, or a share names no dataset.
    Pass one positive share per dataset, and leave out datasets that should not contribute.
unique_filter: Two filters have the same name.
    Give every filter a different name.
usage: The command has an unknown verb, option or value, or lacks a required one.
    Follow the hint, or run `rollouts VERB --help`.
weights: Two candidates of an audit have the same version.
    Pass `--weights VERSION=DIR` with different versions, or leave one of them out.
"""

_ENGINE = """\
answer_encoding: The engine compressed its response (`Content-Encoding`), which the recorder cannot
    read.
    Turn off response compression in the engine or in the proxy in front of it.
answer_size: The engine's response exceeds one of the recorder's limits: total size, number of stream
    events, number of choices, or size of fields other than tokens, text and log-probabilities.
    Raise `rollouts record --max-answer-mb` if the message names its limit, or request fewer
    choices, fewer tokens or fewer log-probabilities per token.
answer_status: The engine's response has an HTTP status outside 200 to 599.
    Check that `--upstream` is the URL of the engine, or correct the proxy in front of it.
context_length: The prompt leaves no room for a response in the engine's context, or exceeds
    `max_input_tokens`.
    Shorten the prompt, raise `max_input_tokens`, or use an engine with a longer context.
engine_answer: The engine's response lacks data that exact training needs (token ids,
    log-probabilities, finish reason), contradicts the request, or comes from servers that serve
    different models.
    Start the server with the flags in docs/engines.md, and serve the same model on every server.
engine_down: The engine did not respond after all retries, dropped the connection, aborted its
    response, did not list its models, or failed while sampling.
    Check that the server is up (`curl URL/health`), read its log, and run the same command again.
engine_redirect: The engine redirected the request to a different URL.
    Set `--upstream` to the URL that the message names.
engine_refused: The engine rejected the request because it does not support a setting, a token id or
    a feature, or cannot load the weights.
    Follow the engine's explanation in the message: remove the unsupported setting, or restart the
    server with the missing flag.
engine_start: The vLLM server exited while the command was starting it, or did not respond within
    `start_timeout_s`.
    Read the server's log, whose path and last lines are in the message, and correct the server's
    arguments.
"""

_EXTRA = """\
extra_installed: An optional package is not installed.
    Run the `pip install` command in the hint.
"""

_INPUT_OR_CONFIG = """\
advantage_estimator: The custom advantage estimator cannot be imported, has the wrong parameters, or
    returned an array of the wrong shape, type or values.
    Return one finite number per element of its inputs, from a function with the parameters in
    docs/algorithms.md.
chat_template: The chat template is unknown, missing or unreadable, or raised an error while it
    rendered the messages.
    Set `--chat-template` to a name that `rollouts templates` lists, or to a Jinja file that renders
    these messages.
known_format: The format is unknown, the content matches no format or several formats, or the inputs
    have different formats.
    Set `--format` to one of the names that `rollouts formats` lists, and convert each format
    separately.
loss_reduction: The custom loss reduction cannot be imported, has the wrong parameters, or returned
    weights of the wrong shape, type or values.
    Return one finite weight per target, from a function with the parameters in docs/algorithms.md.
out_is_free: The output path already exists, is inside the input dataset, or a different process is
    writing to it.
    Choose a different `--out`, remove the old output, or wait for the other process.
policy_loss_type: The custom policy loss cannot be imported, has the wrong parameters, or returned
    losses or metrics of the wrong shape, type or values.
    Return one finite, differentiable loss per target, from a function with the parameters in
    docs/algorithms.md.
resume_config: The configuration differs from the run to resume, or asks for fewer updates than the
    run has made; or the run's `config.json` is missing or invalid.
    Use the settings in the run's `config.json`, or start a new run.
reward_key: `--reward` names a reward that the log does not have, the log has several rewards and
    none was chosen, or the log's format has fixed rewards.
    Set `--reward` to one of the names that the message lists, or leave it out.
row_too_long: A row has more tokens than the model's context, or the configured lengths exceed the
    context.
    Lower `max_input_tokens` or `max_response_tokens`, or truncate rows with `max_row_tokens`.
tokenizer: A tokenizer is required but missing, is not a local directory that can be loaded, or
    cannot encode the text.
    Pass `--tokenizer DIR` with the directory of a downloaded model, or download it: `hf download NAME`.
"""


def _entries(text: str) -> dict[str, tuple[str, str]]:
    entries = {}
    for paragraph in re.split(r"\n(?! )", text.strip()):
        name, sentences = " ".join(paragraph.split()).split(": ", 1)
        cause, fix = sentences.split(". ")
        entries[name] = f"{cause}.", fix
    return entries


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


_INVARIANTS = {
    rule.name: (f"The data breaks an invariant: {rule.meaning}.", _sentence(rule.hint))
    for rule in RULES.values()
}

ERROR_IDS: dict[str, ErrorId] = {
    name: ErrorId(kinds=kinds, cause=cause, fix=fix)
    for kinds, texts in (
        ((InvariantError,), _INVARIANTS),
        ((InputError,), _entries(_INPUT)),
        ((ConfigError,), _entries(_CONFIG)),
        ((EngineError,), _entries(_ENGINE)),
        ((MissingExtra,), _entries(_EXTRA)),
        ((InputError, ConfigError), _entries(_INPUT_OR_CONFIG)),
    )
    for name, (cause, fix) in sorted(texts.items())
}
"""All error ids, ordered by kind and name."""
