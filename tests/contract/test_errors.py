import json

import pytest

from kvoy_contract import errors
from kvoy_contract.errors import ApiError, BadRequest, ModelNotFound, Saturated


def test_an_error_is_an_openai_error_object() -> None:
    error = BadRequest("`n` is wrong.", param="n", code="bad_n")

    assert json.loads(error.to_json()) == {
        "error": {
            "message": "`n` is wrong.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "bad_n",
        }
    }


def test_an_unknown_model_is_named() -> None:
    error = ModelNotFound("gpt-9")

    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "gpt-9" in error.message


@pytest.mark.parametrize(("after_s", "header"), [(0.2, "1"), (2.0, "2"), (2.1, "3"), (2.6, "3")])
def test_a_time_to_retry_is_a_header_in_whole_seconds(after_s: float, header: str) -> None:
    assert Saturated("Full.", retry_after_s=after_s).headers() == [("retry-after", header)]
    assert Saturated("Full.").headers() == []


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("BadRequest", 400),
        ("ContextLengthExceeded", 400),
        ("Unauthorized", 401),
        ("Forbidden", 403),
        ("NotFound", 404),
        ("MethodNotAllowed", 405),
        ("RequestTimeout", 408),
        ("PayloadTooLarge", 413),
        ("Saturated", 429),
        ("EngineFailed", 500),
        ("UpstreamFailed", 502),
        ("Unavailable", 503),
        ("DeadlineExceeded", 504),
    ],
)
def test_each_error_knows_its_status(name: str, status: int) -> None:
    error_type = getattr(errors, name)

    assert issubclass(error_type, ApiError)
    assert error_type("x").status == status
