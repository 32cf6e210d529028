"""What `launch/test.sh --all` adds to the tests that run by default: cases that take long.

A case stands here where a shorter one beside it goes the same way, or where what it holds is one
part of the product that few changes touch. A name without brackets is the whole test.
"""

LONG = {
    "backbones/test_parity.py": ("test_scan_unroll_and_remat_agree_exactly[electra-rtd-narrow]",),
    "backbones/test_segments.py": (
        "test_a_packed_document_reads_as_it_does_alone[roberta-prefix-packed]",
        "test_a_packed_document_reads_as_it_does_alone[electra-prefix-packed]",
        "test_a_packed_document_reads_as_it_does_alone[t5-slots-packed]",
    ),
    "cli/test_adapt.py": (
        "test_the_result_tells_the_best_look_at_it[rtd-bert]",
        "test_the_result_tells_the_best_look_at_it[mlm-roberta]",
        "test_each_loss_has_its_learning_rate[rtd-bert]",
        "test_each_loss_has_its_learning_rate[mlm-roberta]",
        "test_it_learns_held_out_text[rtd-bert]",
        "test_it_learns_held_out_text[mlm-roberta]",
    ),
    "cli/test_adapt_hosts.py": ("test_eight_devices_adapt_as_one[span_corruption-t5]",),
    "cli/test_annotate.py": ("test_two_processes_label_as_one",),
    "cli/test_decoders.py": (
        "test_learns_to_write[t5-2]",
        "test_learns_exports_and_predicts[t5_full_target]",
        "test_learns_exports_and_predicts[t5_full_text]",
        "test_learns_exports_and_predicts[t5_soft_linear]",
        "test_learns_exports_and_predicts[gpt2_soft_linear]",
    ),
    "cli/test_keeping.py": (
        "test_a_run_that_keeps_is_the_same_run[bert_left]",
        "test_half_the_bytes_cost_digits_only",
        "test_a_run_that_keeps_is_the_same_run[bert_mesh]",
        "test_a_run_that_keeps_is_the_same_run[t5_decoder]",
        "test_a_run_that_keeps_is_the_same_run[bert_bfloat16]",
        "test_a_run_that_keeps_is_the_same_run[gpt2_upper]",
    ),
    "cli/test_learns.py": (
        "test_learns[bias_only]",
        "test_learns[layernorm_only]",
        "test_learns[soft_labels]",
        "test_learns[soft_text]",
        "test_what_is_exported_predicts_as_what_was_trained[prefix_mlp]",
    ),
    "cli/test_measure.py": ("test_a_computed_prompt_is_folded_once_a_pass[eight]",),
    "cli/test_mesh.py": (
        "test_a_run_on_eight_devices_is_that_on_one[soft]",
        "test_a_run_on_eight_devices_is_that_on_one[full]",),
    "cli/test_paper.py": (
        "test_a_table_that_was_stopped_goes_on[pt]",),
    "cli/test_plan.py": (
        "test_without_devices_it_says_what_is_held_and_sent",
        "test_the_largest_is_planned_over_four_devices",),
    "cli/test_pretrain.py": (
        "test_sigkill_then_sigterm_then_the_same_end",
        "test_it_learns[nsp-t5]",
        "test_it_learns[cls-bert]",
        "test_two_processes_pretrain_as_one",
    ),
    "cli/test_pretrain_runs.py": (
        "test_every_run_is_as_if_alone[nsp",
        "test_alone_and_in_turn_where_it_is_better",
        "test_killed_and_stopped_it_ends_with_the_same_bits",),
    "cli/test_runs.py": (
        "test_chunks[on a CPU",
        "test_splits_of_unequal_sizes",
        "test_free_texts",
        "test_other_backbones_and_all_that_trains[electra]",
        "test_other_backbones_and_all_that_trains[gpt2]",
        "test_a_group_that_is_killed_resumes_bit_for_bit[step 5]",
        "test_a_group_that_is_killed_resumes_bit_for_bit[tests]",
    ),
    "cli/test_small.py": (
        "test_a_discriminator_begins_with_a_generator",
        "test_a_masked_lm_is_made_once_and_compared",
        "test_a_t5_is_made_from_nothing",),
    "cli/test_train_hosts.py": (
        "test_process_0_alone_writes_and_prints[4]",
        "test_each_process_reads_its_share[4]",
        "test_several_processes_train_as_one[4]",
        "test_sigterm_then_sigkill_then_the_same_end",
    ),
    "convert/test_save.py": ("test_two_processes_save_what_they_share[t5-gated]",),
    "corpus/test_corpus.py": ("test_memory_does_not_grow_with_the_corpus", "test_full_disk[2]"),
    "launch/test_bench.py": ("test_it_measures[words2", "test_it_measures[words1"),
    "launch/test_bench_gpu.py": (
        "test_a_dry_run_takes_every_path[soft-scan-0.0-inductor",
        "test_no_gpu_is_one_line[cpu]",
    ),
    "layers/test_stack.py": (
        "test_every_way_is_bit_equal_forward[unroll-full]",
        "test_layers_without_the_prefix_are_spared_it[unroll-full]",
        "test_every_way_is_bit_equal_forward[unroll-dots]",
        "test_every_way_drops_the_same_elements[unroll-full]",
        "test_layers_without_the_prefix_are_spared_it[unroll-dots]",
        "test_layers_without_the_prefix_are_spared_it[unroll-none]",
    ),
    "models/test_generation.py": ("test_a_prompt_is_read_once[prefix-t5-outside]",),
    "parallel/test_sharding.py": (
        "test_every_way_to_run_a_stack_is_one_computation_on_a_mesh[unroll-full-both]",
        "test_every_way_to_run_a_stack_is_one_computation_on_a_mesh[scan-full-all]",
        "test_loss_and_gradients_are_those_of_one_device[t5-prefix-fsdp]",
        "test_loss_and_gradients_are_those_of_one_device[t5-prefix-both]",
    ),
    "planning/test_cost.py": ("test_memory_is_that_of_real_steps",),
    "sweeps/test_runner.py": (
        "test_adam_and_dropout_follow_the_curve_of_a_run_alone[t5",
        "test_runs_divide_over_the_data_axis[soft-mesh3",
    ),
    "training/test_feature_store.py": (
        "test_the_rest_of_a_model_gives_the_same[t5-decoder",
        "test_the_rest_of_a_model_gives_the_same[t5-middle",
        "test_the_rest_of_a_model_gives_the_same[roberta-upper",
    ),
    "training/test_packed.py": ("test_a_step_is_that_of_the_documents[span_corruption]",),
    "cli/test_reading_runs.py": (
        "test_scores_are_those_of_torch[t5]",
    ),
    "convert/test_random_weights.py": (
        "test_two_processes_draw_what_one_draws",
    ),
    "convert/test_load_sharded.py": (
        "test_each_host_reads_its_shards_and_hashes_its_part[fsdp]",
        "test_each_host_reads_its_shards_and_hashes_its_part[copies]",
    ),
    "cli/test_token_heads.py": (
        "test_a_grid_and_kept_states_give_the_same[tags]",
    ),
    "cli/test_settings.py": (
        "test_the_numbers_stay[unroll]",
        "test_the_numbers_stay[remat_dots_unrolled]",
    ),
    "docs/test_commands.py": (
        "test_commands_run[serving]",
        "test_commands_run[README]",
        "test_commands_run[backbones]",
        "test_commands_run[data]",
        "test_commands_run[devices]",
        "test_commands_run[grids]",
        "test_commands_run[heads]",
        "test_commands_run[methods]",
        "test_commands_run[plan]",
        "test_commands_run[ppt]",
        "test_commands_run[results]",
        "test_commands_run[troubleshooting]",
    ),
    "docs/test_notebook.py": ("test_the_notebook_runs",),
}  # fmt: skip


def is_long(file: str, name: str) -> bool:
    """Tells whether a test of `file`, by its name with the brackets, is one of these."""
    return any(name.partition("[")[0] == own or name.startswith(own) for own in LONG.get(file, ()))
