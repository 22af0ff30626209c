# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata: the contract of four operations, which every implementation keeps.

    fa_metadata      lengths, their sums, and the tables of pages: every mode
    draft_expand     draft decode with topk > 1: lengths and tables of the branches after the prefix
    verify_expand    target verify with topk > 1: for each draft token the slots of its ancestors
    local_attention  Llama 4's chunks, one query for each request, without reading lengths on the host

Each takes one job of `jobs.py`: `implementation.fa_metadata(FaMetadata(...))`. `reference.py` does it in plain torch,
`triton.py` and `cuda.py` in one launch each. All results are integers, so "equal" means equal.

For all of them:

- They launch on the current stream, allocate nothing, synchronise nothing, and return None. The grid depends on shapes
  and never on values, so a captured launch is right for other lengths.
- `bs` is `cache_seqlens.shape[0]` (`seqused.shape[0]` in local_attention). Other inputs and outputs may be longer or
  have more rows, which are neither read nor written. `bs` may be 0: sums still begin with their 0.
- i32 and i64 are dtypes; where both are allowed, each tensor has its own, and may have the other in the next call.
- One-dimensional tensors, and the rows of two-dimensional ones, have stride 1; the row stride is arbitrary.
- `page_size` is a power of two, 1 to 1024. A page is the slot of its first token, divided by `page_size`, rounded down.
- `mapping` [i64] maps a slot to a slot in the pool of sliding-window layers. A slot below 0 has no entry and becomes
  -1; a page of -1 is -1.
- Indices of requests and slots >= 0 are trusted to lie within their tables, because SGLang made them.
- An output is either written as described below, or keeps every bit it had ("stale"). Nothing in between.
- Outputs do not overlap inputs or each other, except as described under Aliases.

FaMetadata

    in   seq_lens           [i32|i64 bs]
         req_pool_indices   [i32|i64 bs]  the row of each request in req_to_token
         req_to_token       [i32 requests x tokens]
         delta              int >= 0, added to every length
         drop_last          bool: cache_seqlens counts whole pages only (draft decode's prefix; no-op for page_size 1)
         row_start          [i32|i64 bs] or None: the token at which a request's table begins (after an encoder's)
         extend_lens        [i32|i64 bs] or None: new tokens of each request
         q_stride           int: new tokens of every request, if extend_lens is None
         out_cache_loc      [i32|i64 n] or None: slots of the new tokens
    out  cache_seqlens      [i32 bs]      length = seq_lens + delta; with drop_last, length - length % page_size
         cu_seqlens_k       [i32 bs+1] or None: 0, then the running sum of length; drop_last does not affect it
         cu_seqlens_q       [i32 bs+1] or None: 0, then the running sum of extend_lens, or multiples of q_stride
         page_table         [i32 bs x W] or None
         swa_page_table     [i32 bs x W] or None: only with page_table, of the same width, with its own row stride
         swa_out_cache_loc  [i64 m >= n] or None: mapping of out_cache_loc, and 0 in [n, m)

    Of each row the first `live` columns are written, with the pages of tokens row_start + column * page_size:
    live = ceil(cache_seqlens / page_size), at most W, and at most the pages that begin within req_to_token's width.
    The columns after them are stale, or 0 with zero_tail. cache_seqlens and the sums are not clamped: a length past the
    context is the caller's error, and stays visible.

    Aliases: cache_seqlens may be seq_lens itself (the same first element, both i32), and swa_out_cache_loc may be
    out_cache_loc itself (both i64). The result is as if everything was read before anything was written. With delta 0
    and no drop_last the lengths are rewritten unchanged, so one launch is enough. Otherwise rows would race with the
    program that writes the lengths, so an implementation makes two launches: first the tables, then lengths and sums.

DraftExpand

    bs = requests * topk rows, request by request; out_cache_loc [i32|i64] holds `steps` slots of each row.
    out  cache_seqlens  [i32 bs]    length + seq_lens[row // topk] % page_size
         page_table     [i32 bs x W], W >= length: the pages of the row's first `length` slots, each run of equal pages
                        once where page_size is above 1; columns after them stale, or 0 with zero_tail
         cu_seqlens_q   [i32 bs+1] or None: 0, 1, 2, ...
         cu_seqlens_k   [i32 bs+1] or None: 0, length, 2 * length, ...: as in SGLang, without the last page
    in   seq_lens       [i32|i64 bs // topk]

VerifyExpand

    bs = requests * draft_tokens rows, request by request. custom_mask [bool or u8] has for each request, and each of
    its draft tokens, seq_lens + draft_tokens flags; the last draft_tokens of them mark the ones it sees.
    in   seq_lens       [i32|i64 requests], cu_seqlens [i32 requests+1]: their running sum, as fa_metadata leaves it in
                        cu_seqlens_k with delta 0
         draft_tokens   1 to 1024
         live_rows      int or None: rows from here on are padding and take all their flags from custom_mask[0];
                        their own flags in custom_mask are not read
    out  cache_seqlens  [i32 bs]    number of draft tokens the row sees
         cu_seqlens_k   [i32 bs+1]  0, then their running sum
         cu_seqlens_q   [i32 bs+1] or None: 0, 1, 2, ...
         page_table     [i32 bs x W], W >= draft_tokens: slots (not pages) of the draft tokens at seq_lens + 0, 1, ...:
                        first those it sees, then the others, each in order; columns after them are stale. A draft
                        token at or past req_to_token's width has slot 0.

LocalAttention

    The chunk that holds the last token of each request; `chunk` is a multiple of page_size.
    in   seq_lens       [i32|i64 bs]
         mapping        [i64] or None: the table is then the sliding-window pool's
    out  seqused        [i32 bs]    (seq_lens - 1) % chunk + 1, and 0 for length 0
         block_table    [i32 bs x W], W >= chunk / page_size: the pages of tokens (seq_lens - 1) // chunk * chunk +
                        column * page_size, ceil(seqused / page_size) of them, and none past req_to_token's
                        width; columns after them are stale, or 0 with zero_tail
         cu_seqlens_q   [i32 bs+1] or None: 0, 1, 2, ...
"""
