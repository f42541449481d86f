"""The standard chat model suite of langchain-tests, run with ChatOpenAI against the proxy."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    """The suite without images and documents, which it would download from the internet."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["BASE_URL"],
            "api_key": "sk-of-the-client",
            "model": "fake-model",
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return "another-model"

    @property
    def supports_json_mode(self) -> bool:
        return True
