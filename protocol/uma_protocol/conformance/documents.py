"""Documents of every type of request and every kind of event, byte for byte as an encoder of the protocol writes them."""

REQUESTS: tuple[bytes, ...] = (
    b'{"type":"generate","id":"a-1","prompt":"Once upon a time"}',
    (
        '{"type":"generate","id":"ü","session":"s","cache":"private","model":"m.gguf","app":"editor'
        '","priority":"background","max_tokens":20,"temperature":0.7,"top_p":0.9,"top_k":40,"min_p"'
        ':0.05,"presence_penalty":0.5,"frequency_penalty":-0.25,"repeat_penalty":1.1,"seed":7,"min_'
        'tokens":5,"stop_token_ids":[2,3],"ignore_eos":true,"speculation":"free","logit_bias":{"150'
        '43":-100.0,"7":2.5},"stop":["\\n","User:"],"stream":false,"continue_final_message":true,"ch'
        'at_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low","slo":{"target_ttft'
        '_ms":250.0,"target_tbt_ms":40.0},"metadata":{"trace":["x",1,null,{"deep":0.5}]},"messages"'
        ':[{"role":"system","content":""},{"role":"user","content":"Say \\"hi\\" \\\\ \\u0000 😀"}]}'
    ).encode(),
    b'{"type":"generate","id":"a-1","logprobs":0,"prompt":"Hi"}',
    b'{"type":"generate","id":"a-1","schema":{"type":"object"},"prompt":"Hi"}',
    b'{"type":"generate","id":"a-1","choice":["yes","no"],"prompt":"Hi"}',
    (
        b'{"type":"generate","id":"a-1","reasoning_budget":0,"tools":[{"name":"look"},{"name":"stop"'
        b',"description":"Stop.","parameters":{"type":"object"},"strict":true}],"tool_choice":"requi'
        b'red","allowed_tools":["look"],"parallel_tool_calls":false,"messages":[{"role":"assistant",'
        b'"content":"","calls":[{"id":"c1","name":"look","arguments":"{}"}],"reasoning":"so"},{"role'
        b'":"tool","content":"sun","call_id":"c1","name":"look"}]}'
    ),
    b'{"type":"generate","id":"a-1","seed":7,"n":2,"prompt":"Hi"}',
    (
        b'{"type":"generate","id":"a-1","lora":[{"name":"polite","scale":0.5},{"id":1}],"progress":t'
        b'rue,"prompt":"Hi"}'
    ),
    b'{"type":"generate","id":"a-1","lora":[],"prompt":"Hi"}',
    b'{"type":"embed","id":"a-1","input":["Once","upon a time"]}',
    b'{"type":"embed","id":"a-1","model":"bge","dimensions":64,"truncate":true,"input":["Once"]}',
    b'{"type":"embed","id":"a-1","progress":true,"input":["Once"]}',
    b'{"type":"rerank","id":"a-1","top_n":1,"query":"Who?","documents":["Ada","Grace"]}',
    b'{"type":"hello","token":"s3cret"}',
    b'{"type":"prefix"}',
    b'{"type":"prefix","action":"pin","session":"s","seconds":60}',
    b'{"type":"cancel","id":"a-1"}',
    b'{"type":"cancel","request":3}',
    b'{"type":"priority","request":3,"priority":"background"}',
    b'{"type":"priority","id":"a-1","priority":"interactive"}',
    b'{"type":"load","model":"code"}',
    b'{"type":"unload","model":"code"}',
    b'{"type":"sessions"}',
    b'{"type":"sessions","ticks":3}',
    b'{"type":"explain"}',
    b'{"type":"explain","request":3,"ticks":0}',
    b'{"type":"metrics"}',
    b'{"type":"metrics","interval_ms":500}',
)

EVENTS: tuple[bytes, ...] = (
    b'{"id":"a-1","event":"token","text":" time","token_id":640}',
    b'{"id":"a-1","event":"token","text":"","token_id":0}',
    b'{"id":"a-1","event":"token","text":"x","token_id":9,"choice":1}',
    b'{"id":"a-1","event":"end","reason":"length","completion_tokens":5,"request":17}',
    (
        b'{"id":"a-1","event":"end","choice":1,"reason":"error","text":".","completion_tokens":2,"re'
        b'quest":18,"code":"E_RUNTIME_003","message":"no"}'
    ),
    (
        b'{"id":"a-1","event":"loading","model":"code","state":"model code is loading, 40%","progres'
        b's":0.4}'
    ),
    b'{"id":"a-1","event":"vectors","first":0,"vectors":["AACAPw==","AAAAPw=="]}',
    b'{"id":"a-1","event":"scores","scores":[[1,2.5],[0,-0.5]]}',
    (
        b'{"id":"a-1","event":"token","text":"","token_id":7,"reasoning":"so","calls":[{"index":0,"i'
        b'd":"c1","name":"look"},{"index":0,"arguments":"{}"}]}'
    ),
    (
        b'{"id":"a-1","event":"token","text":"a","token_id":5,"logprobs":{"logprob":-0.5,"top":[[5,"'
        b'a",-0.5],[6,"b",-2.0]]}}'
    ),
    (
        b'{"id":"a-1","event":"eos","reason":"stop","text":".","usage":{"prompt_tokens":5,"completio'
        b'n_tokens":2,"cached_tokens":0},"timings":{"queue_ms":0.5,"ttft_ms":12.5,"total_ms":40.0,"t'
        b'okens_per_s":50.0},"request":17,"metadata":{"k":"v"}}'
    ),
    (
        b'{"id":"a-1","event":"eos","reason":"error","usage":{"prompt_tokens":5,"completion_tokens":'
        b'0,"cached_tokens":4},"timings":{"queue_ms":0.5,"total_ms":1.0,"tokens_per_s":0.0},"request'
        b'":18,"code":"E_RUNTIME_002","message":"no room"}'
    ),
    (
        b'{"id":"b","event":"error","code":"E_LIMIT_003","message":"busy","fatal":false,"retryable":'
        b'true,"retry_after_ms":100}'
    ),
    b'{"event":"error","code":"E_PROTO_002","message":"no","fatal":true,"retryable":false}',
    b'{"event":"ok"}',
    (
        b'{"event":"prefix","budget_bytes":1000,"used_bytes":600,"prefixes":[{"pages":2,"tokens":100'
        b',"bytes":500,"leaf_tokens":7,"sessions":["s"]}],"dropped":5}'
    ),
    b'{"id":"a-1","event":"ok"}',
    (
        b'{"event":"sessions","sessions":[{"request":17,"id":"a-1","uid":1000,"state":"decode","lane'
        b'":"interactive","prompt_tokens":5,"computed_tokens":5,"completion_tokens":2,"tokens_per_s"'
        b':50.0,"age_ms":40.0}]}'
    ),
    (
        b'{"event":"explain","requests":[{"request":17,"state":"stop","lane":"interactive","age_ms":'
        b'90.0,"total_ms":40.0,"prompt_tokens":5,"completion_tokens":2,"queue_ms":1.5,"queue_reason"'
        b':"all 8 slots were busy","ttft_ms":12.5,"prefill":{"tokens":5,"ticks":1,"computing_ms":9.0'
        b',"skipped":{"full":2}},"worst_gap":{"gap_ms":9.5,"tick":4,"reason":"long tick"},"reason":"'
        b'stop"}],"ticks":[{"tick":4,"age_ms":50.0,"items":[{"request":17,"phase":"decode","tokens":'
        b'1,"reason":"one token each"}],"skipped":[{"request":18,"reason":"no room"}],"limit_ms":10.'
        b'5,"limit_reason":"within 1.2x","measured_ms":9.5}],"ticks_left_out":1}'
    ),
    b'{"event":"metrics","metrics":{"tokens":3,"up":1.5}}',
)
