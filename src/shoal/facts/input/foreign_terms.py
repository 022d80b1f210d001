"""Translate other tools' terms into Shoal's: Hugging Face, DeepSpeed, Megatron, torchtitan, Accelerate, nanotron.

Users who come from one of them try its words first. Each is answered with a config key, a layout key or a sentence; a
similar-looking word would send them to the wrong setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

# Answers: a config key, a layout key, or a sentence, whichever matches.

KEYS: Mapping[str, str] = {
    word: key
    for key, words in {
        "run.name": "run_name experiment_name exp_name job_name wandb_run_name",
        "run.dir": "output_dir save_dir dump_folder checkpoints_path checkpoint_dir save_folder checkpoint.dir "
        "checkpoint.path checkpoint.folder model_save_path default_root_dir",
        "data.source": "dataset dataset_name dataset_path datasets train_file train_files train_data train_dataset "
        "train_data_path data_path data_dir data_files data.path data.dir data.files data.name data.train "
        "hf_dataset_or_datasets",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model tokenizer_type",
        "data.field": "text_column dataset_text_field text_field text_column_name data.column data.text",
        "data.heldout": "split validation_split_percentage val_size test_size",
        "evaluate.source": "validation_file eval_dataset valid_data eval_file eval_data",
        "evaluate.patience": "early_stopping_patience early_stopping",
        "evaluate.watch": "metric_for_best_model",
        "data.format": "dataset_format dataset_type",
        "data.template": "chat_template",
        "data.loss_on": "completion_only_loss assistant_only_loss train_on_responses_only train_on_inputs",
        "recipe.batch_ramp": "rampup_batch_size batch_size_rampup batch_warmup",
        "recipe.epochs": "epoch num_epochs num_train_epochs max_epochs n_epochs train_epochs",
        "data.workers": "num_workers dataloader_num_workers preprocessing_num_workers dataset_num_proc",
        "recipe.seq": "seq_length seq_len sequence_length max_seq_length max_seq_len max_sequence_length block_size "
        "max_length model_max_length cutoff_len context_length",
        "recipe.batch": "global_batch_size train_batch_size total_batch_size effective_batch_size global_batch "
        "batch_size",
        "recipe.steps": "max_steps train_iters train_steps total_steps num_steps num_training_steps max_iters "
        "total_num_steps training_steps iterations max_train_steps train_samples lr_decay_iters lr_decay_steps",
        "recipe.tokens": "train_tokens total_tokens max_tokens num_tokens",
        "recipe.optimizer": "optim optimizer_type optimizer_name optim_type optimizer.name optimizer.type",
        "recipe.lr": "learning_rate base_lr peak_lr max_lr warmup_max_lr",
        "recipe.beta1": "adam_beta1",
        "recipe.beta2": "adam_beta2",
        "recipe.eps": "adam_epsilon adam_eps epsilon",
        "recipe.weight_decay": "wd",
        "recipe.schedule": "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style lr_scheduler_name scheduler "
        "scheduler_type decay_type",
        "recipe.warmup": "warmup_steps warmup_ratio warmup_iters warmup_num_steps num_warmup_steps lr_warmup_iters "
        "lr_warmup_steps lr_warmup_fraction",
        "recipe.decay": "decay_ratio lr_wsd_decay_iters lr_decay_ratio",
        "recipe.lr_min": "min_lr min_lr_factor min_lr_ratio min_decay_lr lr_min_ratio cos_min_ratio",
        "recipe.clip": "max_grad_norm max_norm grad_clip clip_grad gradient_clipping gradient_clip_val clip_grad_norm",
        "recipe.seed": "data_seed random_seed",
        "recipe.dropout": "hidden_dropout attention_dropout dropout_rate",
        "recipe.loss": "loss_type loss_fn objective",
        "recipe.beta": "dpo_beta",
        "recipe.z_loss": "z_loss_weight z_loss_coeff z_loss_multiplier softmax_auxiliary_loss lse_square_scale",
        "recipe.precision": "mixed_precision dtype torch_dtype params_dtype mixed_precision_param",
        "recipe.reduce": "mixed_precision_reduce communication_data_type grad_reduce_in_bf16 "
        "accumulate_grad_in_fp32 accumulate_allreduce_grads_in_fp32",
        "evaluate.every": "eval_steps eval_interval eval_freq eval_strategy evaluation_strategy val_check_interval",
        "evaluate.batches": "eval_iters eval_batches max_eval_samples limit_val_batches",
        "checkpoint.every": "save_steps save_interval save_freq save_strategy checkpoint_interval checkpointing_steps "
        "checkpoint.interval checkpoint.steps",
        "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep",
        "checkpoint.keep_best": "load_best_model_at_end save_top_k",
        "checkpoint.background": "async_save async_mode",
        "compile.enabled": "torch_compile use_compile enable_compile torchcompile",
        "tune.bucket_mb": "bucket_cap_mb ddp_bucket_size reduce_bucket_size ddp_bucket_cap_mb",
        "tune.prefetch": "stage3_prefetch_bucket_size fsdp_forward_prefetch",
        "tune.persist_below": "stage3_param_persistence_threshold",
        "fault.timeout": "ddp_timeout distributed_timeout_minutes distributed_timeout init_timeout_seconds "
        "train_timeout_seconds",
        "track.wandb": "wandb_project use_wandb",
        "track.tensorboard": "tensorboard_dir logging_dir enable_tensorboard",
        "model.preset": "model.name model.flavor model.type",
        "model.init_from": "model.weights model.pretrained model.checkpoint initial_load_path init_model_path",
        "model.lora.rank": "lora_r lora_rank model.lora.r",
        "model.lora.alpha": "lora_alpha",
        "model.lora.dropout": "lora_dropout model.lora.lora_dropout",
        "model.lora.targets": "target_modules lora_target_modules lora_target model.lora.target_modules",
        "cluster.on": "use_cpu accelerator",
    }.items()
    for word in words.split()
}

LAYOUT: Mapping[str, str] = {
    word: key
    for key, words in {
        "dp": "ddp dp_replicate dp_replicate_size replicate data_parallel data_parallel_size "
        "data_parallel_replicate_degree dp_degree dp_size replicas",
        "fsdp": "dp_shard dp_shard_size shard data_parallel_shard_degree fsdp_size fully_sharded fsdp2",
        "zero": "zero_stage zero_optimization stage sharding_strategy fsdp_sharding_strategy "
        "fsdp_reshard_after_forward reshard_after_forward use_distributed_optimizer",
        "tp": "tensor tensor_parallel tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size "
        "autotp_size tp_degree",
        "sp": "sequence_parallel sequence_parallelism",
        "cp": "context context_parallel context_parallel_size context_parallel_degree cp_size cp_degree ulysses ring "
        "sequence_parallel_size",
        "cp_kind": "cp_comm_type context_parallel_rotate_method cp_comm_strategy",
        "pp": "pipeline pipe pipeline_parallel pipeline_model_parallel_size pipeline_parallel_size "
        "pipeline_parallel_degree pp_size pp_degree stages",
        "schedule": "pipeline_parallel_schedule pp_engine pp_schedule pipeline_schedule",
        "chunks": "vpp virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank model_chunks virtual_stages",
        "ep": "expert experts expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree "
        "ep_size ep_degree moe_ep",
        "micro": "micro_batch_size micro_batch microbatch microbatch_size mbs local_batch_size "
        "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu "
        "pipeline_parallel_microbatch_size device_batch_size",
        "recompute": "ac activation_checkpointing activation_checkpoint checkpoint_activations "
        "gradient_checkpointing recompute_activations recompute_granularity remat recompute_layer "
        "activation_checkpoint.mode",
        "offload": "cpu_offload offload_optimizer offload_param offload_optimizer_device offload_param_device "
        "fsdp_offload_params optimizer_cpu_offload enable_cpu_offload",
    }.items()
    for word in words.split()
}

_ACCUMULATION = (
    "it follows from recipe.batch and micro of the layout: recipe.batch = dp · fsdp · micro · accumulation"
)
_SHAPE = "the model's shape is that of model.preset, or of the config.json at model.path"
_MODEL = "model.preset is a shape by name, model.path a config.json or its directory, model.init_from weights as well"
_EVERY_STEP = "nothing to set: every step has its row in the run's metrics.jsonl"
_RANKS = "the layout says it: dp · fsdp · tp · cp · pp ranks; cluster.on says on what"
_RESUME = "shoal train continues a run that has a checkpoint; model.init_from takes the weights of a model"
_ORDER = "nothing to set: samples come in an order that follows from recipe.seed"

SENTENCES: Mapping[str, str] = {
    word: sentence
    for sentence, words in {
        _ACCUMULATION: "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps gas "
        "accumulation accumulation_steps accumulate_grad_batches batch_accumulation_per_replica",
        _SHAPE: "num_layers num_hidden_layers n_layer n_layers hidden_size n_embd ffn_hidden_size intermediate_size "
        "num_attention_heads n_head n_heads num_heads num_query_groups num_key_value_heads vocab_size num_experts "
        "max_position_embeddings model.layers model.hidden model.heads model.vocab model.config",
        _MODEL: "model_name_or_path pretrained_model_name_or_path base_model model_name model_path model_id "
        "hf_assets_path pretrained",
        _EVERY_STEP: "logging_steps log_interval log_freq logging_strategy steps_per_print log_every "
        "log_every_n_steps",
        _RANKS: "num_processes nproc_per_node num_gpus gpus n_gpu n_gpus devices world_size num_gpus_per_node "
        "gpus_per_node",
        _RESUME: "resume resume_from_checkpoint load_checkpoint resume_checkpoint_path load_from "
        "ignore_data_skip",
        _ORDER: "shuffle_seed",
        'it is recipe.precision here: recipe.precision = "bf16"': "bf16 bfloat16",
        'it is recipe.precision here: recipe.precision = "fp16"': "fp16",
        "they are recipe.beta1 and recipe.beta2 here": "betas adam_betas",
        "shoal train --fresh moves an old run aside and starts anew": "overwrite_output_dir overwrite",
        "shoal train --nodes N, run on each of them": "num_machines nnodes num_nodes",
        "track.tensorboard, track.wandb, track.mlflow and track.trackio are switches": "report_to log_with",
        "an evaluation reads evaluate.batches batches of recipe.batch sequences": "per_device_eval_batch_size "
        "eval_batch_size",
        "mp is tp=N here where layers are split, pp=N where the network is cut into stages": "mp model_parallel "
        "model_parallel_size",
        "dp=N is the number of replicas, fsdp=N the ranks that shard each of them": "hsdp hybrid_shard",
    }.items()
    for word in words.split()
}

# Planned keys, and what to write until then. A key leaves this table once the schema has it.
LATER: Mapping[str, str] = {}

# Planned commands, and what to do until then.
_IN_METRICS = "a run's metrics.jsonl and samples.jsonl have every step and what the model wrote"
LATER_COMMANDS: Mapping[str, str] = {
    "generate": "evaluate.samples has a run write texts at each evaluation: samples.jsonl",
    "evaluate": "evaluate.every has a run evaluate itself; its results are in metrics.jsonl",
    "replay": "shoal parity compares layouts step by step",
    "report": _IN_METRICS,
    "watch": _IN_METRICS,
}

# Values of other tools, mapped to a layout's or config's.
VALUES: Mapping[str, str] = {
    word: value
    for value, words in {
        "bf16": "bfloat16 bf16-mixed bf16-true torch.bfloat16",
        "fp16": "float16 half 16 16-mixed torch.float16",
        "fp32": "float32 float 32 no torch.float32",
        "fp64": "float64 double torch.float64",
        "adamw": "adam adamw_torch adamw_torch_fused adamw_hf fusedadam adamw_fused",
        "cosine": "cosine_with_restarts cosine_with_min_lr warmupcosinelr",
        "constant": "constant_with_warmup warmuplr",
        "linear": "warmupdecaylr",
        "wsd": "warmup_stable_decay",
        "interleaved": "interleaved1f1b interleaved-1f1b vpp",
        "zb": "zerobubble zero_bubble zb-h1 zbh1",
        "zbv": "zbvzerobubble",
        "ring": "p2p",
        "ulysses": "a2a alltoall all_to_all",
        "none": "false off",
        "full": "true on",
        "selective": "op",
    }.items()
    for word in words.split()
}

# Architectures that look like a supported one by name, and are not.
OTHER_MODEL_TYPES = frozenset({"gpt_neo"})


class Meaning(NamedTuple):
    """Exactly one of them is set."""

    key: str = ""  # of a config
    layout: str = ""  # of a layout
    sentence: str = ""


def normalised(word: str) -> str:
    """Make a word's spellings as flag, key and command-line option equal."""
    return re.sub(r"[\s-]+", "_", word.strip().lstrip("-").lower())


def meaning(word: str) -> Meaning | None:
    """The counterpart of another tool's word; ``recipe.learning_rate`` is looked up whole, then by its last part."""
    whole = normalised(word)
    for each in dict.fromkeys((whole, whole.rpartition(".")[2])):
        if each in KEYS:
            return Meaning(key=KEYS[each])
        if each in LAYOUT:
            return Meaning(layout=LAYOUT[each])
        if each in SENTENCES:
            return Meaning(sentence=SENTENCES[each])
    return None


# Additional explanation if one of these keys is the answer.
BESIDE: Mapping[str, str] = {
    "micro": "; recipe.batch counts the sequences of a step over all ranks",
    "zero": "; fsdp=N says how many ranks share",
}


def layout_pair(key: str, value: object) -> str:
    """A layout key with another tool's value, if that is valid here: ``tp=2``."""
    text = str(value).lower()
    if key == "recompute":
        return f"{key}={text if text in ('none', 'selective', 'full') else VALUES.get(text, 'full')}"
    if key in ("schedule", "cp_kind"):
        return f"{key}={VALUES[text]}" if text in VALUES else f"{key}=…"
    if key == "offload":
        return "offload=optimizer"
    if key == "sp":
        return "sp=0" if text in ("0", "false") else "sp=1"
    allowed = ("1", "2", "3") if key == "zero" else ()
    counts = text in allowed if allowed else bool(re.fullmatch(r"[1-9][0-9]{0,8}", text))
    return f"{key}={text}" if counts else f"{key}=…"
