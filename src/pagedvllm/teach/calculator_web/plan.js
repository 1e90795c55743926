// The arithmetic of `pagedvllm.teach.memory_plan`, line by line: whole numbers of bytes, exact below 2^53.

const GIB = 2 ** 30;

const peak = ([forward, sampling], tokens, rows) => {
  const bytes = ([token, row, fixed]) => token * tokens + row * Math.min(rows, tokens) + fixed;
  return Math.max(bytes(forward), bytes(sampling));
};

const plan = (data, s) => {
  const model = data.models[s.model];
  const size = data.dtypes[s.dtype];
  const needs = model.needs[size];
  const total = data.gpus[s.gpu].memory;
  const requested = Math.ceil(total * s.gpu_memory_utilization);
  const weights = needs.weights + needs.table * s.max_model_len;
  const tokens = Math.min(s.max_num_batched_tokens, s.max_num_seqs * Math.max(s.max_model_len - 1, 1));
  const activations = peak(needs.activations, tokens, s.max_num_seqs);
  const available = requested - weights - activations - s.non_torch - s.cuda_graphs;
  const page = needs.kv * s.block_size;
  const fit = Math.floor(available / page);
  const num_blocks = fit < 2 ? 0 : fit; // one is the null block: fewer than two are refused
  const per_request = Math.ceil(s.max_model_len / s.block_size);
  const usable = Math.max(0, num_blocks - 1);
  const free = total - s.used_before;
  const problem =
    (s.max_model_len > model.positions && "positions") ||
    (s.max_num_batched_tokens < s.max_num_seqs && "budget") ||
    (free < requested && "start") ||
    (needs.weights > free && "weights") ||
    (num_blocks === 0 && "nothing") ||
    (per_request > usable && "long") ||
    "";
  return {
    total,
    requested,
    free,
    weights,
    activations,
    non_torch: s.non_torch,
    cuda_graphs: s.cuda_graphs,
    used_before: s.used_before,
    available,
    kv_cache: num_blocks * page,
    unused: free - weights - activations - s.non_torch - s.cuda_graphs - num_blocks * page,
    page_bytes: page,
    token_bytes: needs.kv,
    num_blocks,
    per_request,
    usable_tokens: usable * s.block_size,
    concurrency: num_blocks / per_request,
    whole_requests: Math.floor(usable / per_request),
    problem,
  };
};
