"""Attention by the Triton kernels.

Knows how a step's batch is laid out for the kernels. Import it only where it runs, as the kernels.
"""

import torch
from torch import Tensor

from megallm.core_async.device import triton_decode, triton_prefill
from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.attention_inputs import turned, unturned
from megallm.core_async.device.triton_work import QueryTiles, RowParts, query_tiles, row_parts

MAX_HEAD_DIM = 256
MAX_FUSED_ROWS = 0
"""Decode rows of a step whose attention norms and turns heads and writes the cache itself; 0 is none.

It saves a kernel a layer, and starts to read keys later: not yet measured on a GPU, so off.
"""


class TritonAttention:
    """Attention by the paged kernels: one for the step's decode rows, one for its chunks.

    Both write into one tensor. Norms of heads, rotary positions and the cache write are a kernel before them;
    or, in steps of a few decode rows alone, attention does it too.
    """

    name = "triton"
    norms_heads = True

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._table_rows: Tensor | None = None
        self._parts: dict[tuple[int, int | None, int], RowParts] = {}
        """Of the step's decode rows, by what of a layer they depend on."""
        self._tiles: dict[int, QueryTiles] = {}
        """Of the step's chunks, by the queries of a tile."""

    def refusal(self, shape: LayerShape) -> str | None:
        """Says why the backend can't run such a layer; see `Attention.refusal`."""
        widest = max(shape.head_dim, shape.value_head_dim)
        return None if widest <= MAX_HEAD_DIM else f"a head has {widest} dimensions, at most {MAX_HEAD_DIM}"

    def begin_step(self, batch: AttentionBatch) -> None:
        """Takes the step's batch; the kernels read it as it is."""
        self._batch = batch
        self._parts.clear()
        self._tiles.clear()
        table_rows = batch.table_rows
        if table_rows is None:
            table_rows = torch.arange(len(batch.kv_lengths), dtype=torch.int32, device=batch.slots.device)
        self._table_rows = table_rows

    def attend(self, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Gives `[tokens, num_heads * value_head_dim]`; see `Attention.attend`."""
        batch, shape = self._batch, layer.shape
        assert batch is not None, "attend before begin_step"
        # the lists come first: the attention kernels read them before the kernel ahead of them has ended
        decoded, num_lists = batch.num_decode, len(self._parts)
        parts = self._parts_of(shape, query.dtype) if decoded else None
        has_chunks = batch.chunk_lengths is not None or len(batch.kv_lengths) > decoded
        tiles = self._tiles_of(shape, query.dtype) if has_chunks else None
        new, is_just_listed = None, False
        if has_chunks or decoded > MAX_FUSED_ROWS:
            query = turned(layer, batch, query, key, value)
        else:
            query, new = unturned(layer, batch, query, key, value)
            is_just_listed = len(self._parts) > num_lists
        out = torch.empty(
            (batch.num_tokens, shape.num_heads, shape.value_head_dim), dtype=query.dtype, device=query.device
        )
        tables = batch.block_tables
        if parts is not None:
            triton_decode.decode_attention(
                layer,
                query[:decoded],
                block_tables=tables,
                parts=parts,
                out=out,
                new=new,
                is_just_listed=is_just_listed,
            )
        if tiles is not None:
            triton_prefill.prefill_attention(layer, query, block_tables=tables, tiles=tiles, out=out)
        return out.view(batch.num_tokens, -1)

    def _parts_of(self, shape: LayerShape, dtype: torch.dtype) -> RowParts:
        """Gives the decode rows' parts: made for the first layer of a kind, and once a step."""
        batch, table_rows = self._batch, self._table_rows
        assert batch is not None, "attend before begin_step"
        assert table_rows is not None, "attend before begin_step"
        key = (shape.num_kv_heads, shape.window, shape.head_dim)
        if key not in self._parts:
            rows = batch.num_decode
            tuning = triton_decode.tuning_for(
                rows,
                shape.num_kv_heads,
                shape.num_heads // shape.num_kv_heads,
                shape.head_dim,
                dtype,
                is_mixed=batch.chunk_lengths is not None,
            )
            self._parts[key] = row_parts(
                batch.kv_lengths[:rows],
                table_rows[:rows],
                window=shape.window,
                max_cuts=tuning.max_cuts,
                min_keys=tuning.min_keys,
            )
        return self._parts[key]

    def _tiles_of(self, shape: LayerShape, dtype: torch.dtype) -> QueryTiles:
        """Gives the chunks' tiles, likewise."""
        batch, table_rows = self._batch, self._table_rows
        assert batch is not None, "attend before begin_step"
        assert table_rows is not None, "attend before begin_step"
        queries = triton_prefill.queries_of_tile(shape, dtype)
        if queries not in self._tiles:
            first = 0 if batch.chunk_lengths is not None else batch.num_decode
            self._tiles[queries] = query_tiles(
                batch.query_starts[first:],
                batch.kv_lengths[first:] if batch.chunk_lengths is None else batch.chunk_lengths,
                table_rows[first:],
                num_queries=batch.num_tokens - first,
                queries=queries,
            )
        return self._tiles[queries]
