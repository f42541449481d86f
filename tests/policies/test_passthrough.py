"""Paths of a backend that clients can reach. The routes are those of vLLM 0.33 and SGLang
0.5.23."""

import pytest

from policies.passthrough import is_stateless, path_kind

CLOSED = """
/abort_request /abort_requests /add_external_corpus /begin_weight_update /close_session
/collective_rpc /configure_logging /continue_generation /destroy_weights_update_group
/dump_expert_distribution_record /dumper/configure /end_weight_update /fault_tolerance/apply
/fault_tolerance/status /finish_weight_update /flush_cache /freeze_gc /gate/activate
/get_hicache_l3_cache_layout /get_remote_instance_transfer_engine_info /get_server_info
/get_weights_by_name /get_world_size /hicache/storage-backend /hicache/storage-backend/clear
/inference/v1/abort_requests /init_weight_transfer_engine
/init_weights_send_group_for_remote_instance /init_weights_update_group /is_paused
/is_scaling_elastic_ep /is_sleeping /kv_event_sources /list_external_corpora /load_lora_adapter
/load_lora_adapter_from_tensors /open_session /pause /pause_generation /pd_role_switch
/register_transfer_engine_info /release_kv_cache_memory /release_memory_occupation
/remote_instance_transfer_engine_info /remove_external_corpus /reset_encoder_cache
/reset_mm_cache /reset_prefix_cache /resume /resume_memory_occupation /scale_elastic_ep
/scheduler_receive_meta_data /scheduler_receive_url /send /send_weights_to_remote_instance
/server_info /set_internal_state /set_trace_level /shutdown_weight_transfer_engine /sleep /slow_down
/start_draft_weight_update /start_expert_distribution_record /start_profile /start_weight_update
/stop_expert_distribution_record /stop_profile /unload_lora_adapter /update_weight_version
/update_weights /update_weights_from_disk /update_weights_from_distributed /update_weights_from_ipc
/update_weights_from_tensor /v1/load_lora_adapter /v1/unload_lora_adapter /wake_up /weight_checker
/weight_info /weights_checker
/api/blobs/sha256:29fd /api/copy /api/create /api/delete /api/pull /api/push
/config/update /key/generate /lora-adapters /slots/0 /user/new
/v1/organization/admin_api_keys /v1/projects
/api/v0/models/load /api/v1/models/download /api/v1/models/load /api/v1/models/unload
/model/delete /model/info /model/new /model/update /v1/download /v1/model/load /v1/model/unload
/api/models/apply /api/models/install
/v1/sampling/override/switch /v1/template/switch /v2/cudasharedmemory/register /v2/logging
/v2/models/mine/trace/setting /v2/models/mine/versions/1/load /v2/repository/index
/v2/repository/models/mine/load /v2/repository/models/mine/unload
/Users /backend/shutdown /budget/new /customer/block /flushall /global/spend/reset /invitation/new
/jwt/key/mapping/new /policies /router_settings /settings /spend/logs /sso/key/generate /tag/new
/teams/team_1/members/bulk_delete /users/bulk_delete /v1/backend/shutdown /v2/login
"""
STORING = """
/v1/assistants /v1/batches /v1/batches/batch_1/cancel /v1/evals /v1/fine_tuning/jobs /v1/prompts
/v1/realtime/client_secrets /v1/skills /v1/threads/thread_1/runs /v1/uploads /v1/vector_stores
/v1/videos /v1beta/cachedContents /v1/images/image_1 /v1/embeddings/anything
/v1/chat/completions/chatcmpl_1 /v1/messages/batches /v1/responses /v1/responses/resp_1/cancel
/openai/v1/responses /v1/ocr/anything /openai/deployments/m/batches /v1/decisions /something/new
"""
STATELESS = """
/ /api/chat /api/generate /api/show /api/tags /classify /cohere/v2/chat /detokenize /docs /encode
/generate /generative_scoring /get_model_info /health_generate /inference/v1/generate /invocations
/load /model_info /parse_function_call /ping /pooling /rerank /score /separate_reasoning
/tokenize /tokenizer_info /v1 /v1/audio/speech /v1/audio/transcriptions
/v1/audio/translations /v1/classify /v1/completions /v1/completions/render
/v1/detokenize /v1/embeddings /v1/images/generations
/v1/loads /v1/moderations /v1/rerank /v1/score /v1/tokenize /v2/embed /v2/rerank
/v2/models/mine/infer /version /beta/completions /v1/fim/completions /v1/ocr
"""
READ_ONLY = """
/models /ready /v2/models /v2/models/mine /v2/models/mine/versions/1/ready
/api/v1/models /api/v1/models/mine
"""


@pytest.mark.parametrize("path", CLOSED.split())
def test_administrative_path_of_the_backend_is_closed(path: str) -> None:
    assert path_kind(path) == "closed"


@pytest.mark.parametrize("path", STATELESS.split())
def test_inference_path_is_forwarded_and_is_stateless_except_for_delete(path: str) -> None:
    assert path_kind(path) == "backend"
    assert is_stateless("POST", path)
    assert is_stateless("GET", path)
    assert not is_stateless("DELETE", path)


@pytest.mark.parametrize("path", STORING.split())
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_path_at_which_the_backend_stores_data_is_not_stateless(method: str, path: str) -> None:
    assert not is_stateless(method, path)
    assert not is_stateless(method, path.upper() + "/")


@pytest.mark.parametrize("path", READ_ONLY.split())
def test_model_paths_are_stateless_only_for_get_and_head(path: str) -> None:
    assert is_stateless("GET", path)
    assert is_stateless("HEAD", path)
    assert not is_stateless("POST", path)
    assert not is_stateless("DELETE", path)


@pytest.mark.parametrize("path", ["/beta/completions", "/v1/fim/completions", "/v1/ocr"])
def test_paths_of_deepseek_and_mistral_are_stateless(path: str) -> None:
    assert is_stateless("POST", path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/engines/m/chat/completions"])
def test_chat_completions_path_is_stateless_for_post_but_not_for_get(path: str) -> None:
    assert is_stateless("POST", path)
    assert not is_stateless("GET", path)


@pytest.mark.parametrize(
    "spelling",
    [
        *("/sleep/", "//sleep", "/SLEEP", "/Sleep", "/%73leep", "/%73%6C%65%65%70", "/slee%50/"),
        *("/%2Fsleep", "/v1/sleep", "/V1//sleep", "/%761/sleep", "/sleep/deeper"),
        *("/v9/sleep", "/api/sleep", "/inference/v1/sleep"),
    ],
)
def test_administrative_path_is_closed_in_every_spelling(spelling: str) -> None:
    assert path_kind(spelling) == "closed"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "sleep",
            "%2fsleep",
            "http://elsewhere.test/sleep",
            "*",
            "/%2573leep",
            "/sleep%00",
            "/sleep%0a",
        ),
        *("/x/../sleep", "/x/%2e%2e/sleep", "/x/.%2E/sleep", "/./sleep", "/sleep;a=b", "/sleep%3b"),
        *("/sleep%3Fx", "/sleep%23", "/x\\..\\sleep", "/x%5csleep", "/sleep%20", "/%c1%b3leep"),
        *("/\u017fleep", "/%EF%BD%93leep", "/sleep%"),
    ],
)
def test_ambiguous_path_is_classified_as_unreadable(path: str) -> None:
    assert path_kind(path) == "unreadable"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses", "/v1/responses/resp_1/cancel", "/v1/messages", "/v1/messages/"),
        *("/V1/messages/count_tokens", "//v1//chat//completions", "/chat/completions"),
        *("/v1/chat/completions/batch", "/v1%2fchat/completions", "/openai/v1/responses"),
        *("/engines/m/chat/completions", "/openai/deployments/m/chat/completions/"),
        *("/v2/chat/completions", "/vllm/v1/chat/completions"),
    ],
)
def test_chat_path_is_forwarded_only_for_models_with_the_plain_suffix(path: str) -> None:
    assert path_kind(path) == "plain only"


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/containers/c/files", "/v1/models/x", "/health/", "/METRICS"]
)
def test_path_of_the_proxys_own_api_is_never_forwarded(path: str) -> None:
    assert path_kind(path) == "ours"
