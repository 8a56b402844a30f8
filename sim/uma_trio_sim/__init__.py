"""The engine in virtual time: for people who write policies, and for tests.

A :class:`~uma_trio_sim.simulation.Simulation` runs the engine itself (queue, admission, policy,
batches, recovery) on a backend whose decodes take the time of a modelled machine. Nothing sleeps
and no thread is started: a simulated minute takes about a second, and the same seed gives the same
run to the last bit. ::

    from uma_trio_sim.machine import built_in, gaussian
    from uma_trio_sim.simulation import Simulation

    def policy(state):  # SchedulerState -> Plan
        ...

    world = Simulation(policy, profile=built_in("q4_0", gaussian(0.02)), seed=1)
    reader = world.submit(prompt_tokens=30, max_tokens=200, client=1)
    world.storm(client=2)  # background prompts, one after another
    world.run(10.0)  # virtual seconds
    print(max(reader.itl))

``uma-trio simulate`` compares policies this way; docs/internals/testing.md says what its columns mean and
what the simulation leaves out.
"""
