import sys, json, torch, faulthandler, time, os
from torch import distributed
from megatron.core import parallel_state
from megallm import MegatronLLM
from megallm.models.megatron_setup import quiet_megatron
from tests.ranks.split_moe import split_moe
from tests.ranks.tensor_parallel import ids_of, make_llm
torch.set_num_threads(1)
out = open(f"/tmp/eng{os.environ['RANK']}", "w")
faulthandler.dump_traceback_later(20, exit=True, file=out)
t0 = time.time()
def log(*a):
    print(*a, round(time.time() - t0, 2), file=out, flush=True)
distributed.init_process_group("gloo")
r = {}
table = {"ep": (2, 1, False), "epsp": (2, 1, True), "etp": (1, 2, False)}
for name in sys.argv[1].split(","):
    ep, etp, sp = table[name]
    log(name)
    with quiet_megatron():
        if parallel_state.is_initialized(): parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, create_gloo_process_groups=False)
        log("groups")
        model = split_moe(sequence_parallel=sp)
    log("made")
    with make_llm(model) as llm:
        log("started")
        if llm.is_primary_rank:
            r[name] = ids_of(llm)
        log("ids")
    log("ended")
print(json.dumps(r), flush=True)
distributed.destroy_process_group()
