"""dflash-bench serve: the load client's command."""

from dflash_aot.benchmarks.load_bench import ServeSettings, make_command


def test_command_of_the_client_names_model_server_and_load():
    settings = ServeSettings(url="http://127.0.0.1:1", rate=2.5)
    one, four = (" ".join(map(str, make_command(settings, "toy", count, f"out/{count}"))) for count in (1, 4))
    assert one.startswith("aiperf profile --streaming") and "--model toy --url http://127.0.0.1:1" in one
    assert "--concurrency 1 " in one and "--artifact-dir out/1 " in one and "--request-count 32 " in one
    assert "--warmup-request-count 4 " in four and '"prefix_caching": false' in four
    assert "--concurrency 4 " in four and "--request-rate 2.5 --arrival-pattern poisson" in four
