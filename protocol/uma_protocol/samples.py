"""Requests and events of every kind, each with the bytes that our encoder writes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .events import (
    Alternative,
    CallPiece,
    End,
    Eos,
    Error,
    Explanation,
    GapInfo,
    ItemInfo,
    Loading,
    Logprobs,
    Metrics,
    Ok,
    PhaseInfo,
    Prefixes,
    PrefixInfo,
    Score,
    Scores,
    SessionInfo,
    Sessions,
    SkipInfo,
    StoryInfo,
    TickInfo,
    Timings,
    Token,
    Usage,
    Vectors,
)
from .requests import (
    Cancel,
    Embed,
    Explain,
    Generate,
    GetMetrics,
    Hello,
    ListSessions,
    LoadModel,
    LoraScale,
    Message,
    Prefix,
    Rerank,
    SetPriority,
    Slo,
    Tool,
    ToolCall,
    UnloadModel,
)

if TYPE_CHECKING:
    from .events import Event
    from .requests import Request

REQUESTS: tuple[tuple[Request, bytes], ...] = (
    (
        Generate(id="a-1", prompt="Once upon a time"),
        b'{"type":"generate","id":"a-1","prompt":"Once upon a time"}',
    ),
    (
        Generate(
            id="ü",
            session="s",
            cache="private",
            model="m.gguf",
            app="editor",
            priority="background",
            max_tokens=20,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            repeat_penalty=1.1,
            logit_bias={15043: -100.0, 7: 2.5},
            seed=7,
            stop=("\n", "User:"),
            stop_token_ids=(2, 3),
            min_tokens=5,
            stream=False,
            ignore_eos=True,
            speculation="free",
            continue_final_message=True,
            chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="low",
            slo=Slo(target_ttft_ms=250.0, target_tbt_ms=40.0),
            metadata={"trace": ["x", 1, None, {"deep": 0.5}]},
            messages=(Message("system", ""), Message("user", 'Say "hi" \\ \x00 \U0001f600')),
        ),
        '{"type":"generate","id":"ü","session":"s","cache":"private","model":"m.gguf","app":"editor",'
        '"priority":"background","max_tokens":20,"temperature":0.7,"top_p":0.9,"top_k":40,'
        '"min_p":0.05,"presence_penalty":0.5,"frequency_penalty":-0.25,"repeat_penalty":1.1,'
        '"seed":7,"min_tokens":5,"stop_token_ids":[2,3],"ignore_eos":true,"speculation":"free",'
        '"logit_bias":{"15043":-100.0,"7":2.5},"stop":["\\n","User:"],"stream":false,'
        '"continue_final_message":true,'
        '"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low",'
        '"slo":{"target_ttft_ms":250.0,"target_tbt_ms":40.0},'
        '"metadata":{"trace":["x",1,null,{"deep":0.5}]},'
        '"messages":[{"role":"system","content":""},'
        '{"role":"user","content":"Say \\"hi\\" \\\\ \\u0000 \U0001f600"}]}'.encode(),
    ),
    (
        Generate(id="a-1", prompt="Hi", logprobs=0),
        b'{"type":"generate","id":"a-1","logprobs":0,"prompt":"Hi"}',
    ),
    (
        Generate(id="a-1", schema={"type": "object"}, prompt="Hi"),
        b'{"type":"generate","id":"a-1","schema":{"type":"object"},"prompt":"Hi"}',
    ),
    (
        Generate(id="a-1", choice=("yes", "no"), prompt="Hi"),
        b'{"type":"generate","id":"a-1","choice":["yes","no"],"prompt":"Hi"}',
    ),
    (
        Generate(
            id="a-1",
            reasoning_budget=0,
            tools=(Tool("look"), Tool("stop", "Stop.", {"type": "object"}, strict=True)),
            tool_choice="required",
            allowed_tools=("look",),
            parallel_tool_calls=False,
            messages=(
                Message("assistant", "", (ToolCall("c1", "look", "{}"),), reasoning="so"),
                Message("tool", "sun", call_id="c1", name="look"),
            ),
        ),
        (
            b'{"type":"generate","id":"a-1","reasoning_budget":0,"tools":[{"name":"look"},'
            b'{"name":"stop","description":"Stop.","parameters":{"type":"object"},"strict":true}],'
            b'"tool_choice":"required","allowed_tools":["look"],"parallel_tool_calls":false,'
            b'"messages":[{"role":"assistant","content":"",'
            b'"calls":[{"id":"c1","name":"look","arguments":"{}"}],"reasoning":"so"},'
            b'{"role":"tool","content":"sun","call_id":"c1","name":"look"}]}'
        ),
    ),
    (
        Generate(id="a-1", seed=7, n=2, prompt="Hi"),
        b'{"type":"generate","id":"a-1","seed":7,"n":2,"prompt":"Hi"}',
    ),
    (
        Generate(
            id="a-1",
            progress=True,
            lora=(LoraScale("polite", scale=0.5), LoraScale(id=1)),
            prompt="Hi",
        ),
        (
            b'{"type":"generate","id":"a-1","lora":[{"name":"polite","scale":0.5},{"id":1}],'
            b'"progress":true,"prompt":"Hi"}'
        ),
    ),
    (
        Generate(id="a-1", lora=(), prompt="Hi"),
        b'{"type":"generate","id":"a-1","lora":[],"prompt":"Hi"}',
    ),
    (
        Embed(id="a-1", input=("Once", "upon a time")),
        b'{"type":"embed","id":"a-1","input":["Once","upon a time"]}',
    ),
    (
        Embed(id="a-1", model="bge", dimensions=64, truncate=True, input=("Once",)),
        b'{"type":"embed","id":"a-1","model":"bge","dimensions":64,"truncate":true,"input":["Once"]}',
    ),
    (
        Embed(id="a-1", progress=True, input=("Once",)),
        b'{"type":"embed","id":"a-1","progress":true,"input":["Once"]}',
    ),
    (
        Rerank(id="a-1", top_n=1, query="Who?", documents=("Ada", "Grace")),
        b'{"type":"rerank","id":"a-1","top_n":1,"query":"Who?","documents":["Ada","Grace"]}',
    ),
    (Hello("s3cret"), b'{"type":"hello","token":"s3cret"}'),
    (Prefix(), b'{"type":"prefix"}'),
    (
        Prefix(action="pin", session="s", seconds=60),
        b'{"type":"prefix","action":"pin","session":"s","seconds":60}',
    ),
    (Cancel("a-1"), b'{"type":"cancel","id":"a-1"}'),
    (Cancel(request=3), b'{"type":"cancel","request":3}'),
    (
        SetPriority(request=3, priority="background"),
        b'{"type":"priority","request":3,"priority":"background"}',
    ),
    (
        SetPriority(id="a-1", priority="interactive"),
        b'{"type":"priority","id":"a-1","priority":"interactive"}',
    ),
    (LoadModel(model="code"), b'{"type":"load","model":"code"}'),
    (UnloadModel(model="code"), b'{"type":"unload","model":"code"}'),
    (ListSessions(), b'{"type":"sessions"}'),
    (ListSessions(ticks=3), b'{"type":"sessions","ticks":3}'),
    (Explain(), b'{"type":"explain"}'),
    (Explain(request=3, ticks=0), b'{"type":"explain","request":3,"ticks":0}'),
    (GetMetrics(), b'{"type":"metrics"}'),
    (GetMetrics(interval_ms=500), b'{"type":"metrics","interval_ms":500}'),
)
"""Requests of every type, each with the bytes that our encoder writes for it."""

EVENTS: tuple[tuple[Event, bytes], ...] = (
    (Token("a-1", " time", 640), b'{"id":"a-1","event":"token","text":" time","token_id":640}'),
    (Token("a-1", "", 0), b'{"id":"a-1","event":"token","text":"","token_id":0}'),
    (
        Token("a-1", "x", 9, choice=1),
        b'{"id":"a-1","event":"token","text":"x","token_id":9,"choice":1}',
    ),
    (
        End("a-1", "length", 5, 17),
        b'{"id":"a-1","event":"end","reason":"length","completion_tokens":5,"request":17}',
    ),
    (
        End("a-1", "error", 2, 18, text=".", code="E_RUNTIME_003", message="no", choice=1),
        (
            b'{"id":"a-1","event":"end","choice":1,"reason":"error","text":".",'
            b'"completion_tokens":2,"request":18,"code":"E_RUNTIME_003","message":"no"}'
        ),
    ),
    (
        Loading("a-1", "code", "model code is loading, 40%", 0.4),
        (
            b'{"id":"a-1","event":"loading","model":"code","state":"model code is loading, 40%",'
            b'"progress":0.4}'
        ),
    ),
    (
        Vectors("a-1", 0, (b"\x00\x00\x80\x3f", b"\x00\x00\x00\x3f")),
        b'{"id":"a-1","event":"vectors","first":0,"vectors":["AACAPw==","AAAAPw=="]}',
    ),
    (
        Scores("a-1", (Score(1, 2.5), Score(0, -0.5))),
        b'{"id":"a-1","event":"scores","scores":[[1,2.5],[0,-0.5]]}',
    ),
    (
        Token("a-1", "", 7, None, "so", (CallPiece(0, "c1", "look"), CallPiece(0, arguments="{}"))),
        (
            b'{"id":"a-1","event":"token","text":"","token_id":7,"reasoning":"so","calls":'
            b'[{"index":0,"id":"c1","name":"look"},{"index":0,"arguments":"{}"}]}'
        ),
    ),
    (
        Token(
            "a-1", "a", 5, Logprobs(-0.5, (Alternative(5, "a", -0.5), Alternative(6, "b", -2.0)))
        ),
        (
            b'{"id":"a-1","event":"token","text":"a","token_id":5,'
            b'"logprobs":{"logprob":-0.5,"top":[[5,"a",-0.5],[6,"b",-2.0]]}}'
        ),
    ),
    (
        Eos(
            "a-1",
            "stop",
            Usage(5, 2),
            Timings(queue_ms=0.5, ttft_ms=12.5, total_ms=40.0, tokens_per_s=50.0),
            17,
            text=".",
            metadata={"k": "v"},
        ),
        (
            b'{"id":"a-1","event":"eos","reason":"stop","text":".",'
            b'"usage":{"prompt_tokens":5,"completion_tokens":2,"cached_tokens":0},'
            b'"timings":{"queue_ms":0.5,"ttft_ms":12.5,"total_ms":40.0,"tokens_per_s":50.0},'
            b'"request":17,"metadata":{"k":"v"}}'
        ),
    ),
    (
        Eos(
            "a-1",
            "error",
            Usage(5, 0, 4),
            Timings(queue_ms=0.5, total_ms=1.0, tokens_per_s=0.0),
            18,
            code="E_RUNTIME_002",
            message="no room",
        ),
        (
            b'{"id":"a-1","event":"eos","reason":"error",'
            b'"usage":{"prompt_tokens":5,"completion_tokens":0,"cached_tokens":4},'
            b'"timings":{"queue_ms":0.5,"total_ms":1.0,"tokens_per_s":0.0},'
            b'"request":18,"code":"E_RUNTIME_002","message":"no room"}'
        ),
    ),
    (
        Error("E_LIMIT_003", "busy", fatal=False, retryable=True, id="b", retry_after_ms=100),
        (
            b'{"id":"b","event":"error","code":"E_LIMIT_003","message":"busy","fatal":false,'
            b'"retryable":true,"retry_after_ms":100}'
        ),
    ),
    (
        Error("E_PROTO_002", "no", fatal=True, retryable=False),
        b'{"event":"error","code":"E_PROTO_002","message":"no","fatal":true,"retryable":false}',
    ),
    (Ok(), b'{"event":"ok"}'),
    (
        Prefixes(
            1000,
            600,
            (PrefixInfo(pages=2, tokens=100, bytes=500, leaf_tokens=7, sessions=("s",)),),
            dropped=5,
        ),
        (
            b'{"event":"prefix","budget_bytes":1000,"used_bytes":600,"prefixes":[{"pages":2,'
            b'"tokens":100,"bytes":500,"leaf_tokens":7,"sessions":["s"]}],"dropped":5}'
        ),
    ),
    (Ok("a-1"), b'{"id":"a-1","event":"ok"}'),
    (
        Sessions(
            (
                SessionInfo(
                    request=17,
                    id="a-1",
                    uid=1000,
                    state="decode",
                    lane="interactive",
                    prompt_tokens=5,
                    computed_tokens=5,
                    completion_tokens=2,
                    tokens_per_s=50.0,
                    age_ms=40.0,
                ),
            )
        ),
        (
            b'{"event":"sessions","sessions":[{"request":17,"id":"a-1","uid":1000,"state":"decode",'
            b'"lane":"interactive","prompt_tokens":5,"computed_tokens":5,"completion_tokens":2,'
            b'"tokens_per_s":50.0,"age_ms":40.0}]}'
        ),
    ),
    (
        Explanation(
            (
                StoryInfo(
                    request=17,
                    state="stop",
                    lane="interactive",
                    age_ms=90.0,
                    total_ms=40.0,
                    prompt_tokens=5,
                    completion_tokens=2,
                    queue_ms=1.5,
                    queue_reason="all 8 slots were busy",
                    ttft_ms=12.5,
                    prefill=PhaseInfo(tokens=5, ticks=1, computing_ms=9.0, skipped={"full": 2}),
                    worst_gap=GapInfo(gap_ms=9.5, tick=4, reason="long tick"),
                    reason="stop",
                ),
            ),
            (
                TickInfo(
                    tick=4,
                    age_ms=50.0,
                    items=(ItemInfo(17, "decode", 1, "one token each"),),
                    skipped=(SkipInfo(18, "no room"),),
                    limit_ms=10.5,
                    limit_reason="within 1.2x",
                    measured_ms=9.5,
                ),
            ),
            1,
        ),
        (
            b'{"event":"explain","requests":[{"request":17,"state":"stop","lane":"interactive",'
            b'"age_ms":90.0,"total_ms":40.0,"prompt_tokens":5,"completion_tokens":2,'
            b'"queue_ms":1.5,"queue_reason":"all 8 slots were busy","ttft_ms":12.5,'
            b'"prefill":{"tokens":5,"ticks":1,"computing_ms":9.0,"skipped":{"full":2}},'
            b'"worst_gap":{"gap_ms":9.5,"tick":4,"reason":"long tick"},"reason":"stop"}],'
            b'"ticks":[{"tick":4,"age_ms":50.0,"items":[{"request":17,"phase":"decode","tokens":1,'
            b'"reason":"one token each"}],"skipped":[{"request":18,"reason":"no room"}],'
            b'"limit_ms":10.5,"limit_reason":"within 1.2x","measured_ms":9.5}],'
            b'"ticks_left_out":1}'
        ),
    ),
    (Metrics({"tokens": 3, "up": 1.5}), b'{"event":"metrics","metrics":{"tokens":3,"up":1.5}}'),
)
"""Events of every kind, each with the bytes that our encoder writes for it."""
