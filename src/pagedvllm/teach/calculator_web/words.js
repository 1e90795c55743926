// What the calculator says, in the two languages of the book. Names of settings stay as they are typed.

const gib = (bytes) => {
  const [unit, name] = Math.abs(bytes) >= 2 ** 30 / 10 || bytes === 0 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(bytes / unit).toFixed(name === "GiB" ? 2 : 1)} ${name}`;
};
const n = (value) => value.toLocaleString("en-US").replace("-", "−");

const WORDS = {
  en: {
    name: "Memory calculator",
    settings: "Settings",
    model: "Model",
    gpu: "GPU",
    non_torch: "non-torch memory, GiB",
    cuda_graphs: "CUDA graphs, GiB",
    used_before: "in use before the start, GiB",
    about: {
      gpu: "memory as CUDA reports it, within about 1%",
      non_torch: "cuBLAS and other libraries; the engine measures it at its start",
      cuda_graphs: "an estimate that the engine holds back; 0: no graphs",
      used_before: "the CUDA context and other processes; the engine measures it",
    },
    parts: {
      weights: "weights",
      activations: "activations, at their peak",
      non_torch: "non-torch",
      cuda_graphs: "CUDA graphs",
      kv_cache: "KV cache",
      used_before: "CUDA context, other processes",
      unused: "left unused",
    },
    missing: "missing",
    hint: {
      marks: "Dashed line: where gpu_memory_utilization ends. Solid line: where the card ends, if more is needed.",
      assumes:
        "One GPU. Activations are counted with torch's own operations and a fused attention kernel; the torch" +
        " attention backend needs more, a score for each pair of tokens.",
    },
    memory: "Memory",
    part: "part",
    size: "size",
    share: "of the card",
    limit: (u) => `gpu_memory_utilization ${u} ends here`,
    end: "the card ends here",
    bar: (all, of) => `${all}; the card has ${of}`,
    results: "Results",
    out: {
      num_blocks: "KV blocks",
      usable_tokens: "tokens that fit in them",
      concurrency: "maximum concurrency",
      token_bytes: "KV cache of one token",
      page_bytes: "KV cache of one block",
      per_request: "blocks of one longest request",
    },
    times: (x, whole) => `${x.toFixed(2)}x (${n(whole)} whole)`,
    bytes: (b) => `${n(b)} bytes`,
    how: "How it is computed",
    requested: (p, u) => `may use: ceil(${n(p.total)} × ${u}) = ${n(p.requested)} bytes`,
    available: (p) =>
      `for the KV cache: ${n(p.requested)} − ${n(p.weights)} (weights) − ${n(p.activations)} (activations)` +
      ` − ${n(p.non_torch)} (non-torch) − ${n(p.cuda_graphs)} (CUDA graphs) = ${n(p.available)} bytes`,
    blocks: (p, s) =>
      `${p.available < 0 ? "below 0" : `floor(${n(p.available)} / ${n(p.page_bytes)})`} → ${n(p.num_blocks)} blocks` +
      ` of ${n(p.page_bytes)} bytes; without the null block ${n(p.usable_tokens / s.block_size)}`,
    longest: (p, s) => `one longest request: ceil(${n(s.max_model_len)} / ${s.block_size}) = ${n(p.per_request)} blocks`,
    fits: (p, s) =>
      `It starts: ${n(p.num_blocks)} blocks, ${n(p.usable_tokens)} tokens. Requests of ${n(s.max_model_len)} tokens:` +
      ` ${n(p.whole_requests)} at once` +
      (p.whole_requests > s.max_num_seqs ? `, but max_num_seqs admits ${n(s.max_num_seqs)}.` : "."),
    whole: (name, least, most) => `${name} must be a whole number from ${n(least)} to ${n(most)}.`,
    amount: (name) => `${name} must be a number of GiB from 0 to 1000.`,
    no: {
      positions: (p, s, m) =>
        `It does not start: max_model_len is ${n(s.max_model_len)}, but ${s.model} has ${n(m.positions)} positions.`,
      budget: (p, s) =>
        `It does not start: max_num_batched_tokens (${n(s.max_num_batched_tokens)}) must be at least max_num_seqs` +
        ` (${n(s.max_num_seqs)}).`,
      start: (p, s) =>
        `It does not start: ${gib(p.free)} are free, gpu_memory_utilization ${s.gpu_memory_utilization} asks for` +
        ` ${gib(p.requested)}. Free ${gib(p.requested - p.free)} or set at most ${p.highest}.`,
      weights: (p) =>
        `The weights do not fit: they need ${gib(p.weights)}, ${gib(p.free)} are free. Choose a smaller model, a` +
        ` smaller dtype or a larger GPU.`,
      nothing: (p) =>
        `No memory is left for the KV cache: two blocks need ${gib(2 * p.page_bytes)},` +
        ` ${p.available < 0 ? `${gib(-p.available)} are missing even without them` : `${gib(p.available)} are left`}.` +
        ` Raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs.`,
      long: (p, s) =>
        `It does not start: a request of max_model_len ${n(s.max_model_len)} needs ${n(p.per_request)} blocks, there` +
        ` are ${n(p.usable_tokens / s.block_size)}. Raise gpu_memory_utilization, or set max_model_len to at most` +
        ` ${n(p.usable_tokens)}.`,
    },
  },
  zh: {
    name: "显存计算器",
    settings: "设置",
    model: "模型",
    gpu: "GPU",
    non_torch: "torch 以外的显存，GiB",
    cuda_graphs: "CUDA graph，GiB",
    used_before: "启动前已占用，GiB",
    about: {
      gpu: "CUDA 报告的显存，误差约 1%",
      non_torch: "cuBLAS 等库；引擎在启动时实测",
      cuda_graphs: "引擎预留的估计值；0 表示不用 CUDA graph",
      used_before: "CUDA 上下文和其他进程；引擎在启动时实测",
    },
    parts: {
      weights: "权重",
      activations: "激活（峰值）",
      non_torch: "torch 以外",
      cuda_graphs: "CUDA graph",
      kv_cache: "KV cache",
      used_before: "CUDA 上下文、其他进程",
      unused: "未使用",
    },
    missing: "缺少",
    hint: {
      marks: "虚线：gpu_memory_utilization 的上限。实线：所需超过整卡时，整卡的尽头。",
      assumes:
        "单张 GPU。激活按 torch 自带算子和融合的注意力 kernel 计数；torch 注意力后端需要更多：每一对 token 一个分数。",
    },
    memory: "显存",
    part: "部分",
    size: "大小",
    share: "占整卡",
    limit: (u) => `gpu_memory_utilization ${u} 到此为止`,
    end: "整卡到此为止",
    bar: (all, of) => `${all}；整卡 ${of}`,
    results: "结果",
    out: {
      num_blocks: "KV 块数",
      usable_tokens: "可容纳的 token 数",
      concurrency: "最大并发",
      token_bytes: "每个 token 的 KV cache",
      page_bytes: "每个块的 KV cache",
      per_request: "最长请求占用的块数",
    },
    times: (x, whole) => `${x.toFixed(2)}x（完整 ${n(whole)} 个）`,
    bytes: (b) => `${n(b)} 字节`,
    how: "计算过程",
    requested: (p, u) => `可用上限：ceil(${n(p.total)} × ${u}) = ${n(p.requested)} 字节`,
    available: (p) =>
      `留给 KV cache：${n(p.requested)} − ${n(p.weights)}（权重）− ${n(p.activations)}（激活）` +
      `− ${n(p.non_torch)}（torch 以外）− ${n(p.cuda_graphs)}（CUDA graph）= ${n(p.available)} 字节`,
    blocks: (p, s) =>
      `${p.available < 0 ? "小于 0" : `floor(${n(p.available)} / ${n(p.page_bytes)})`} → ${n(p.num_blocks)} 个块，` +
      `每块 ${n(p.page_bytes)} 字节；去掉空块后 ${n(p.usable_tokens / s.block_size)} 个`,
    longest: (p, s) => `一个最长请求：ceil(${n(s.max_model_len)} / ${s.block_size}) = ${n(p.per_request)} 个块`,
    fits: (p, s) =>
      `可以启动：${n(p.num_blocks)} 个块，${n(p.usable_tokens)} 个 token。` +
      `长度为 ${n(s.max_model_len)} 个 token 的请求可同时容纳 ${n(p.whole_requests)} 个` +
      (p.whole_requests > s.max_num_seqs ? `，但 max_num_seqs 只允许 ${n(s.max_num_seqs)} 个。` : "。"),
    whole: (name, least, most) => `${name} 必须是 ${n(least)} 到 ${n(most)} 之间的整数。`,
    amount: (name) => `${name} 必须是 0 到 1000 之间的 GiB 数。`,
    no: {
      positions: (p, s, m) =>
        `无法启动：max_model_len 是 ${n(s.max_model_len)}，而 ${s.model} 只有 ${n(m.positions)} 个位置。`,
      budget: (p, s) =>
        `无法启动：max_num_batched_tokens（${n(s.max_num_batched_tokens)}）不能小于` +
        ` max_num_seqs（${n(s.max_num_seqs)}）。`,
      start: (p, s) =>
        `无法启动：空闲 ${gib(p.free)}，而 gpu_memory_utilization ${s.gpu_memory_utilization} 要求` +
        ` ${gib(p.requested)}。请腾出 ${gib(p.requested - p.free)}，或设为不大于 ${p.highest}。`,
      weights: (p) =>
        `权重放不下：需要 ${gib(p.weights)}，空闲 ${gib(p.free)}。请换更小的模型、更小的 dtype 或更大的 GPU。`,
      nothing: (p) =>
        `没有显存留给 KV cache：两个块需要 ${gib(2 * p.page_bytes)}，` +
        `${p.available < 0 ? `不算它们就已缺少 ${gib(-p.available)}` : `只剩 ${gib(p.available)}`}。` +
        `请提高 gpu_memory_utilization，或降低 max_num_batched_tokens 或 max_num_seqs。`,
      long: (p, s) =>
        `无法启动：长度为 max_model_len ${n(s.max_model_len)} 的请求需要 ${n(p.per_request)} 个块，而只有` +
        ` ${n(p.usable_tokens / s.block_size)} 个。请提高 gpu_memory_utilization，或把 max_model_len 设为不大于` +
        ` ${n(p.usable_tokens)}。`,
    },
  },
};
